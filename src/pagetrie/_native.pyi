"""The native extension (``native/``): kernels over pages. Import torch first, so that both use one OpenMP runtime."""

import numpy as np
import numpy.typing as npt
import torch

_Ints = npt.NDArray[np.int32]

def isa() -> str:
    """The instruction set in use: portable, avx2 or avx512."""

def best_isa() -> str:
    """The best instruction set that this machine has."""

def set_isa(name: str) -> None:
    """Choose the instruction set for the whole process ("auto" for the best); for tests.

    Raises:
        ValueError: no such instruction set, or this machine lacks it.
    """

def set_threads(threads: int) -> None:
    """Set the number of threads that kernels use, for the whole process; 0 for OpenMP's default.

    Raises:
        ValueError: fewer than 0.
    """

def threads() -> int:
    """The number of threads that kernels use."""

class KvPages:
    """Keys and values in pages, in an array that someone else owns. One call at a time uses it; others wait."""

    counting: bool
    """Whether attention counts what it reads."""
    bytes_read: int
    """Bytes of keys and values read while counting, in whole tiles of 16 tokens."""

    def __init__(self, data: torch.Tensor, page_size: int) -> None:
        """Use an array as pages.

        Args:
            data: contiguous float16 or float32 [num_pages, n_layers, 2, n_kv_heads, head_dim * page_size]: a head's
                keys as [head_dim, page_size], then its values as [page_size, head_dim].
            page_size: tokens in a page.

        Raises:
            ValueError: another type or shape, or a head_dim that is odd or above 256.
        """

class AttentionPlan:
    """Who attends to what in a step, worked out once for all layers."""

    def __init__(
        self,
        page_size: int,
        starts: _Ints,
        counts: _Ints,
        tables: _Ints,
        table_offsets: _Ints,
        n_heads: int,
        n_kv_heads: int,
        window: int = 0,
    ) -> None:
        """Plan a step.

        Args:
            page_size: tokens in a page.
            starts: [sequences] position of each sequence's first token in this step.
            counts: [sequences] its tokens in this step.
            tables: the page tables one after the other.
            table_offsets: [sequences + 1] where each begins in ``tables``.
            n_heads, n_kv_heads: query heads, a multiple of the heads of keys and values.
            window: tokens in reach of each (its own included), 0 for all before it.

        Raises:
            ValueError: lengths don't agree, a table is too short or holds a page below 0.
        """

    @property
    def tokens(self) -> int:
        """The step's tokens."""

def store(plan: AttentionPlan, pages: KvPages, layer: int, kv: torch.Tensor) -> None:
    """Store the step's keys and values in one layer.

    Args:
        plan: the step.
        pages: where to.
        layer: the layer.
        kv: float32 [tokens, 2 * n_kv_heads, head_dim], keys before values; tokens may lie apart. Values beyond fp16's
            range are stored as the largest it has.

    Raises:
        ValueError: a shape or type that doesn't fit, or a page that doesn't exist.
    """

def rotate_and_store(
    plan: AttentionPlan, pages: KvPages, layer: int, qkv: torch.Tensor, rotations: torch.Tensor
) -> None:
    """Rotate queries and keys in place, then store the step's keys and values.

    Args:
        plan: the step.
        pages: where to.
        layer: the layer.
        qkv: float32 [tokens, n_heads + 2 * n_kv_heads, head_dim]: queries, keys, values; tokens may lie apart.
        rotations: float32 [tokens, head_dim / 2, 2] cosines and sines; pairs of adjacent elements are rotated.

    Raises:
        ValueError: a shape or type that doesn't fit, or a page that doesn't exist.
    """

def attend(plan: AttentionPlan, pages: KvPages, layer: int, q: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    """Attend in one layer from all queries to what the pages hold, the step's own tokens included.

    Args:
        plan: the step.
        pages: keys and values.
        layer: the layer.
        q: float32 [tokens, n_heads, head_dim]; tokens may lie apart.
        out: the results, of the same shape; tokens may lie apart.
        scale: factor on the scores.

    Raises:
        ValueError: a shape or type that doesn't fit, or a page that doesn't exist.
    """

def peak(turns: int, threads: int = 1) -> float:
    """Multiply and add in registers alone; returns how many operations. The limit that kernels are measured by."""

class QuantizedMatrix:
    """Weights of 8 or 4 bits in groups of 32 along the inputs, packed. Products take rows quantised alike."""

    @staticmethod
    def from_floats(weight: torch.Tensor, bias: torch.Tensor | None = None) -> QuantizedMatrix:
        """Quantise to 8 bits; the error of a weight is at most half its group's scale, about max |w| / 254.

        Args:
            weight: contiguous float32 [out_features, in_features].
            bias: contiguous float32 [out_features]; kept as it is.

        Raises:
            ValueError: another type or shape, or weights that aren't finite or are beyond fp16's range.
        """

    @staticmethod
    def from_blocks(blocks: torch.Tensor, kind: str, bias: torch.Tensor | None = None) -> QuantizedMatrix:
        """Pack a GGUF tensor's blocks as they are, without loss.

        Args:
            blocks: contiguous uint8 [out_features, in_features / 32, bytes of a block].
            kind: ``q4_0``, ``q4_1`` (both stay 4 bits) or ``q8_0``.
            bias: contiguous float32 [out_features]; kept as it is.

        Raises:
            ValueError: another type or shape, or scales that aren't finite.
        """

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def bits(self) -> int:
        """Bits of a weight, without its share of scales: 8 or 4."""

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights, scales included."""

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """``out = x @ weights.T + bias``; a row's result doesn't depend on the others.

        Args:
            x: contiguous float32 [rows, in_features].
            out: contiguous float32 [rows, out_features], set.

        Raises:
            ValueError: another type or shape.
        """

    def dequantize(self, out: torch.Tensor) -> None:
        """Set ``out``, contiguous float32 [out_features, in_features], to the weights. Raises ValueError."""

def quantize_rows(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantise activations as products do: per row and group of 32, scale = max |x| / 127.

    Args:
        x: contiguous float32 [rows, k].
        values: contiguous int8 [rows, k rounded up to 32], set.
        scales: contiguous float32 [rows, groups], set; not a number where a group holds what isn't finite.

    Raises:
        ValueError: another type or shape.
    """

class QuantizedDecoder:
    """A decoder of the Llama family over quantised weights. One call at a time uses it; others wait."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rms_eps: float,
        embedding: QuantizedMatrix,
        head: QuantizedMatrix,
        final_norm: torch.Tensor,
    ) -> None:
        """A decoder without layers.

        Args:
            hidden, intermediate, heads, kv_heads, head_dim, rms_eps: as in ``ModelConfig``.
            embedding, head: [vocab_size, hidden]; may be the same.
            final_norm: float32 [hidden].

        Raises:
            ValueError: shapes don't fit.
        """

    def add_layer(
        self,
        attention_norm: torch.Tensor,
        qkv: QuantizedMatrix,
        head_norm: torch.Tensor,
        output: QuantizedMatrix,
        mlp_norm: torch.Tensor,
        gate_up: QuantizedMatrix,
        down: QuantizedMatrix,
    ) -> None:
        """Append a layer.

        Args:
            attention_norm, mlp_norm: float32 [hidden].
            qkv: [(heads + 2 * kv_heads) * head_dim, hidden]; in q and k, what is rotated together lies side by side.
            head_norm: float32 [heads + kv_heads, head_dim], or empty for none.
            output: [hidden, heads * head_dim].
            gate_up: [2 * intermediate rounded up to 16, hidden]: 16 rows of the gate, 16 of up, and so on.
            down: [hidden, intermediate].

        Raises:
            ValueError: shapes don't fit.
        """

    def forward(
        self,
        plan: AttentionPlan,
        pages: KvPages,
        token_ids: torch.Tensor,
        rotations: torch.Tensor,
        hidden: torch.Tensor,
    ) -> None:
        """Run a step's tokens through all layers; their keys and values go to the pages.

        Args:
            plan: the step.
            pages: keys and values.
            token_ids: contiguous int64 [tokens].
            rotations: contiguous float32 [tokens, head_dim]: pairs of cosine and sine.
            hidden: contiguous float32 [tokens, hidden], set to what comes before the final norm.

        Raises:
            ValueError: shapes, types, ids or pages that don't fit.
        """

    def logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Set ``out``, contiguous float32 [rows, vocab_size], to the next-token logits of rows of ``hidden``.

        Raises:
            ValueError: another type or shape.
        """

class PageCodec:
    """Pages in fewer bytes, with loss: ``int8``, or ``k8v4`` with values of 4 bits. See ``native/src/page_codec.h``."""

    def __init__(self, name: str, dtype: str, n_layers: int, n_kv_heads: int, head_dim: int, page_size: int) -> None:
        """Make a codec for pages [n_layers, 2, n_kv_heads, head_dim * page_size] as ``KvPages`` has them.

        Args:
            name: int8 or k8v4.
            dtype: fp16 or fp32, of the page.
            n_layers, n_kv_heads, head_dim, page_size: of the page.

        Raises:
            ValueError: another name or dtype, or a size that isn't from 1 to 65,536.
        """

    @property
    def name(self) -> str: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def encoded_bytes(self) -> int: ...
    def encode(self, src: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> bool:
        """Encode a page, contiguous uint8 [page_bytes], into contiguous uint8 [encoded_bytes].

        Returns:
            False, with ``out`` of no use, if it holds NaN, infinity or a magnitude above 2^120.

        Raises:
            ValueError: another type or length, or a page that isn't aligned to its values.
        """

    def decode(self, src: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
        """Decode into a page. Raises ValueError as ``encode`` does."""
