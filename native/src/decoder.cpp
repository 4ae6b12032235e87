// The forward pass in two forms that give the same bits. With few tokens, reading weights is the cost: the threads share
// each product's columns and wait for each other between phases. With many, arithmetic is: each thread takes a block of
// rows through a whole layer, its activations staying in its own cache.
#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "team.h"

namespace pagetrie {

namespace {

constexpr int64_t kRows = 32;       // rows of a block; with 1,536 columns between the MLP's products that is 200 KB
constexpr int64_t kOwnRows = 4;     // up to where each thread quantises all rows for itself, rather than wait for others
constexpr int64_t kManyRows = 24;   // per thread, from where on blocks of rows are faster

int64_t groups_of(int64_t k) { return (k + kGroup - 1) / kGroup; }

Epilogue store_to(float* out, int64_t width) { return {Epilogue::Kind::store, out, width, width}; }
Epilogue add_to(float* out, int64_t width) { return {Epilogue::Kind::add, out, width, width}; }
Epilogue swiglu_to(float* out, int64_t width) { return {Epilogue::Kind::swiglu, out, width, width}; }

}  // namespace

// What a step works on.
struct QuantizedDecoder::Work {
  const LinearKernels& kernels;
  int64_t tokens;
  float* x;          // [tokens, hidden], the residual stream
  float* qkv;        // [tokens, qkv_width]
  float* mixed;      // [tokens, mixed_width]
  float* gated;      // [tokens, intermediate]; null with blocks of rows
  uint8_t* memory;   // for quantised rows, memory_bytes per thread; one part for all if memory_bytes is 0
  int64_t memory_bytes;
};

void QuantizedDecoder::check(const Matrix& matrix, int64_t n, int64_t k, const char* name) const {
  if (!matrix || matrix->n != n || matrix->k != k)
    throw std::invalid_argument(std::string(name) + " must be [" + std::to_string(n) + ", " + std::to_string(k) +
                                "], got " +
                                (matrix ? "[" + std::to_string(matrix->n) + ", " + std::to_string(matrix->k) + "]"
                                        : "none"));
}

QuantizedDecoder::QuantizedDecoder(const DecoderSizes& sizes, Matrix embedding, Matrix head,
                                   std::vector<float> final_norm)
    : sizes_(sizes), qkv_width_((sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim),
      mixed_width_(sizes.heads * sizes.head_dim), embedding_(std::move(embedding)), head_(std::move(head)),
      final_norm_(std::move(final_norm)) {
  if (!head_) throw std::invalid_argument("head must be a matrix, got none");
  check(head_, head_->n, sizes.hidden, "head");
  check(embedding_, head_->n, sizes.hidden, "embedding");
  if (static_cast<int64_t>(final_norm_.size()) != sizes.hidden)
    throw std::invalid_argument("final_norm must have " + std::to_string(sizes.hidden) + " values, got " +
                                std::to_string(final_norm_.size()));
}

void QuantizedDecoder::add_layer(DecoderLayer layer) {
  const int64_t padded = (sizes_.intermediate + kPanel - 1) / kPanel * kPanel;
  check(layer.qkv, qkv_width_, sizes_.hidden, "qkv");
  check(layer.output, sizes_.hidden, mixed_width_, "output");
  check(layer.gate_up, 2 * padded, sizes_.hidden, "gate_up");
  check(layer.down, sizes_.hidden, sizes_.intermediate, "down");
  const int64_t norms = (sizes_.heads + sizes_.kv_heads) * sizes_.head_dim;
  if (static_cast<int64_t>(layer.attention_norm.size()) != sizes_.hidden ||
      static_cast<int64_t>(layer.mlp_norm.size()) != sizes_.hidden ||
      (!layer.head_norm.empty() && static_cast<int64_t>(layer.head_norm.size()) != norms))
    throw std::invalid_argument("norms must have " + std::to_string(sizes_.hidden) + " values, those of heads " +
                                std::to_string(norms));
  layers_.push_back(std::move(layer));
}

void QuantizedDecoder::normalize_heads(const DecoderLayer& layer, Work& work, int64_t first, int64_t rows) const {
  if (layer.head_norm.empty()) return;
  for (int64_t row = first; row < first + rows; row++)
    work.kernels.head_norm(work.qkv + row * qkv_width_, sizes_.heads + sizes_.kv_heads, sizes_.head_dim,
                           layer.head_norm.data(), sizes_.rms_eps);
}

// A block of rows: what follows attention in layer `index`, then what comes before it in the next. -1 begins.
void QuantizedDecoder::run_rows(Work& work, int64_t index, int thread, int64_t first, int64_t rows) const {
  const LinearKernels& kernels = work.kernels;
  const int64_t hidden = sizes_.hidden, inner = sizes_.intermediate;
  uint8_t* memory = work.memory + thread * work.memory_bytes;
  float* gated = reinterpret_cast<float*>(memory);
  memory += (kRows * inner * sizeof(float) + 63) / 64 * 64;
  float* x = work.x + first * hidden;
  const auto rows_for = [&](const Matrix& matrix) {
    return QuantizedRows::in(memory, rows, matrix->groups, kernels.wide(matrix->format));
  };
  const auto multiply = [&](const Matrix& matrix, const QuantizedRows& a, const Epilogue& to) {
    kernels.multiply(*matrix, a, rows, 0, matrix->panels, to);
  };
  if (index >= 0) {
    const DecoderLayer& layer = layers_[index];
    const QuantizedRows mixed = rows_for(layer.output);
    kernels.quantize(work.mixed + first * mixed_width_, mixed_width_, rows, mixed_width_, mixed);
    multiply(layer.output, mixed, add_to(x, hidden));
    const QuantizedRows normed = rows_for(layer.gate_up);
    kernels.norm_quantize(x, hidden, rows, hidden, layer.mlp_norm.data(), sizes_.rms_eps, normed);
    multiply(layer.gate_up, normed, swiglu_to(gated, inner));
    const QuantizedRows narrow = rows_for(layer.down);
    kernels.quantize(gated, inner, rows, inner, narrow);
    multiply(layer.down, narrow, add_to(x, hidden));
  }
  if (index + 1 < layers()) {
    const DecoderLayer& layer = layers_[index + 1];
    const QuantizedRows normed = rows_for(layer.qkv);
    kernels.norm_quantize(x, hidden, rows, hidden, layer.attention_norm.data(), sizes_.rms_eps, normed);
    multiply(layer.qkv, normed, store_to(work.qkv + first * qkv_width_, qkv_width_));
    normalize_heads(layer, work, first, rows);
  }
}

// All rows, the threads sharing columns: as run_rows.
void QuantizedDecoder::run_columns(Work& work, int64_t index, Team& team) const {
  const LinearKernels& kernels = work.kernels;
  const int64_t hidden = sizes_.hidden, inner = sizes_.intermediate, tokens = work.tokens;
  const bool own = work.memory_bytes > 0;
  uint8_t* memory = work.memory + team.thread() * work.memory_bytes;
  const auto rows_for = [&](const Matrix& matrix) {
    return QuantizedRows::in(memory, tokens, matrix->groups, kernels.wide(matrix->format));
  };
  const auto each_row = [&](const auto& body) { own ? body(0, tokens) : team.share(tokens, 1, body); };
  const auto multiply = [&](const Matrix& matrix, const QuantizedRows& a, const Epilogue& to, int64_t unit) {
    team.share(matrix->panels, unit, [&](int64_t first, int64_t last) {
      kernels.multiply(*matrix, a, tokens, first, last, to);
    });
  };
  const auto quantize = [&](const float* from, int64_t width, const QuantizedRows& to) {
    each_row([&](int64_t first, int64_t last) {
      kernels.quantize(from + first * width, width, last - first, width, to.from_row(first));
    });
  };
  const auto normalize = [&](const std::vector<float>& norm, const QuantizedRows& to) {
    each_row([&](int64_t first, int64_t last) {
      kernels.norm_quantize(work.x + first * hidden, hidden, last - first, hidden, norm.data(), sizes_.rms_eps,
                            to.from_row(first));
    });
  };
  if (index >= 0) {
    const DecoderLayer& layer = layers_[index];
    const QuantizedRows mixed = rows_for(layer.output);
    quantize(work.mixed, mixed_width_, mixed);
    multiply(layer.output, mixed, add_to(work.x, hidden), 1);
    const QuantizedRows normed = rows_for(layer.gate_up);
    normalize(layer.mlp_norm, normed);
    multiply(layer.gate_up, normed, swiglu_to(work.gated, inner), 2);
    const QuantizedRows narrow = rows_for(layer.down);
    quantize(work.gated, inner, narrow);
    multiply(layer.down, narrow, add_to(work.x, hidden), 1);
  }
  if (index + 1 < layers()) {
    const DecoderLayer& layer = layers_[index + 1];
    const QuantizedRows normed = rows_for(layer.qkv);
    normalize(layer.attention_norm, normed);
    multiply(layer.qkv, normed, store_to(work.qkv, qkv_width_), 1);
    if (!layer.head_norm.empty())
      team.share(tokens, 1, [&](int64_t first, int64_t last) { normalize_heads(layer, work, first, last - first); });
  }
}

void QuantizedDecoder::forward(const AttentionPlan& plan, KvPages& pages, const int64_t* token_ids,
                               const float* rotations, float* hidden, int threads) {
  const int64_t tokens = plan.tokens(), width = sizes_.hidden, inner = sizes_.intermediate;
  if (pages.n_layers != layers() || pages.n_kv_heads != sizes_.kv_heads || pages.head_dim != sizes_.head_dim ||
      plan.n_heads() != sizes_.heads)
    throw std::invalid_argument("the pages or the plan are those of another model");
  for (int64_t i = 0; i < tokens; i++)
    if (token_ids[i] < 0 || token_ids[i] >= embedding_->n)
      throw std::invalid_argument("token ids must be from 0 to " + std::to_string(embedding_->n - 1) + ", got " +
                                  std::to_string(token_ids[i]));
  const std::lock_guard<std::mutex> guard(lock_);
  const LinearKernels& kernels = linear_kernels();
  const bool by_rows = tokens >= kManyRows * threads;
  const int64_t widest = groups_of(std::max({width, inner, mixed_width_}));
  Work work{kernels, tokens, hidden, qkv_.get<float>(tokens * qkv_width_), mixed_.get<float>(tokens * mixed_width_),
            nullptr, nullptr, 0};
  if (by_rows) {
    work.memory_bytes = (kRows * inner * sizeof(float) + 63) / 64 * 64 +
                        (QuantizedRows::bytes_needed(kRows, widest) + 63) / 64 * 64;
    work.memory = quantized_.get<uint8_t>(work.memory_bytes * threads);
  } else {
    work.gated = gated_.get<float>(tokens * inner);
    const int64_t bytes = (QuantizedRows::bytes_needed(tokens, widest) + 63) / 64 * 64;
    work.memory_bytes = tokens <= kOwnRows ? bytes : 0;
    work.memory = quantized_.get<uint8_t>(bytes * (tokens <= kOwnRows ? threads : 1));
  }
  // Blocks that split the rows evenly, so that no thread waits for a last, whole one.
  const int64_t blocks = std::max<int64_t>(threads, (tokens + kRows - 1) / kRows);
  const int64_t rows = std::min(kRows, ((tokens + blocks - 1) / blocks + 3) / 4 * 4);
  const auto between = [&](int64_t index) {
    if (by_rows) {
      parallel_items(threads, (tokens + rows - 1) / rows, [&](int thread, size_t block) {
        const int64_t first = static_cast<int64_t>(block) * rows;
        run_rows(work, index, thread, first, std::min(rows, tokens - first));
      });
    } else {
      together(threads, [&](Team& team) { run_columns(work, index, team); });
    }
  };
  const float scale = 1.0f / std::sqrt(static_cast<float>(sizes_.head_dim));
  for (int64_t i = 0; i < tokens; i++) kernels.dequantize_row(*embedding_, token_ids[i], hidden + i * width);
  between(-1);
  for (int64_t index = 0; index < layers(); index++) {
    plan.store(pages, static_cast<int>(index), work.qkv, qkv_width_, rotations, threads);
    plan.attend(pages, static_cast<int>(index), work.qkv, qkv_width_, work.mixed, mixed_width_, scale, threads);
    between(index);
  }
}

void QuantizedDecoder::logits(const float* hidden, int64_t rows, float* out, int threads) {
  const std::lock_guard<std::mutex> guard(lock_);
  const LinearKernels& kernels = linear_kernels();
  const int64_t width = sizes_.hidden;
  uint8_t* memory = quantized_.get<uint8_t>(QuantizedRows::bytes_needed(rows, head_->groups));
  const QuantizedRows normed = QuantizedRows::in(memory, rows, head_->groups, kernels.wide(head_->format));
  together(threads, [&](Team& team) {
    team.share(rows, 1, [&](int64_t first, int64_t last) {
      kernels.norm_quantize(hidden + first * width, width, last - first, width, final_norm_.data(), sizes_.rms_eps,
                            normed.from_row(first));
    });
    team.share(head_->panels, 1, [&](int64_t first, int64_t last) {
      kernels.multiply(*head_, normed, rows, first, last, store_to(out, vocabulary()));
    });
  });
}

}  // namespace pagetrie
