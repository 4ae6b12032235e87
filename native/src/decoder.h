// A whole forward pass over quantised weights, in one call: a step of one token is some 1 ms of work, and 300 calls
// from Python would cost more than that.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "attention.h"
#include "linear.h"

namespace pagetrie {

class Team;

// Sizes as in pagetrie.models.config.ModelConfig.
struct DecoderSizes {
  int64_t hidden, intermediate, heads, kv_heads, head_dim;
  float rms_eps;
};

using Matrix = std::shared_ptr<const PackedMatrix>;

// One layer's weights. Rows of q and k lie in the order that AttentionPlan::store rotates (pairs side by side).
struct DecoderLayer {
  std::vector<float> attention_norm;  // [hidden]
  Matrix qkv;                         // [(heads + 2 kv_heads) * head_dim, hidden]
  std::vector<float> head_norm;       // [heads + kv_heads, head_dim], or empty
  Matrix output;                      // [hidden, heads * head_dim]
  std::vector<float> mlp_norm;        // [hidden]
  Matrix gate_up;                     // [2 * intermediate rounded up to 16, hidden], 16 rows of gate, 16 of up, ...
  Matrix down;                        // [hidden, intermediate]
};

// A decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3). Activations are fp32, quantised for each product.
// A row's result doesn't depend on the other rows, nor on the number of threads.
class QuantizedDecoder {
 public:
  // Throws std::invalid_argument if shapes don't fit.
  QuantizedDecoder(const DecoderSizes& sizes, Matrix embedding, Matrix head, std::vector<float> final_norm);

  // Appends a layer. Throws std::invalid_argument if shapes don't fit.
  void add_layer(DecoderLayer layer);

  const DecoderSizes& sizes() const { return sizes_; }
  int64_t vocabulary() const { return head_->n; }
  int64_t layers() const { return static_cast<int64_t>(layers_.size()); }

  // Runs all layers over a step's tokens and stores their keys and values.
  //
  // token_ids is [plan.tokens()]; rotations [tokens, head_dim / 2] pairs (cos, sin); hidden [tokens, hidden] is set to
  // the residual stream before the final norm. Throws std::invalid_argument.
  void forward(const AttentionPlan& plan, KvPages& pages, const int64_t* token_ids, const float* rotations,
               float* hidden, int threads);

  // Next-token logits [rows, vocabulary] of rows of forward's result.
  void logits(const float* hidden, int64_t rows, float* out, int threads);

 private:
  struct Work;
  void check(const Matrix& matrix, int64_t n, int64_t k, const char* name) const;
  void normalize_heads(const DecoderLayer& layer, Work& work, int64_t first, int64_t rows) const;
  void run_rows(Work& work, int64_t index, int thread, int64_t first, int64_t rows) const;
  void run_columns(Work& work, int64_t index, Team& team) const;

  DecoderSizes sizes_;
  int64_t qkv_width_, mixed_width_;
  Matrix embedding_, head_;
  std::vector<float> final_norm_;
  std::vector<DecoderLayer> layers_;

  // Working memory, kept from step to step and used by one call at a time.
  std::mutex lock_;
  Buffer qkv_, mixed_, gated_, quantized_;
};

}  // namespace pagetrie
