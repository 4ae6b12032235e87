"""How byte-level BPE vocabularies split text before merging, by the name that GGUF gives the rule.

GGUF stores only a name (tokenizer.ggml.pre). The rules are those of the models' own tokenizer.json, and the names and
their grouping llama.cpp's (src/llama-vocab.cpp). A rule is a list of patterns, applied one after the other: each cuts
every piece that the one before left into matches and what lies between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼι"
    r"ῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One rule.

    Attributes:
        patterns: regular expressions in Oniguruma's syntax.
        ignore_merges: a piece that is a token as it stands becomes that token, without merging.
        add_bos: texts begin with the BOS token unless the file says otherwise.
        nfc: text is brought to Unicode's form C first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False

    def normalizer_json(self) -> dict[str, Any] | None:
        """The rule's normalizer in tokenizer.json's form."""
        return {"type": "NFC"} if self.nfc else None

    def json(self) -> dict[str, Any]:
        """The rule's pre-tokenizer in tokenizer.json's form."""
        splits: list[dict[str, Any]] = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        return {"type": "Sequence", "pretokenizers": [*splits, to_bytes]}


_BY_RULE: dict[PreTokenizer, tuple[str, ...]] = {
    PreTokenizer((_GPT2,)): (
        *("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat", "a.x-4.0", "mellum"),
        "exaone4",
    ),
    PreTokenizer((r"\p{N}", _GPT2)): (
        *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): ("default",),
    PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")): ("falcon",),
    PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True): (
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    ),
    PreTokenizer((_LLAMA3,)): ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
    PreTokenizer((_QWEN2,), nfc=True): ("qwen2", "deepseek-r1-qwen", "megrez"),
    PreTokenizer((_QWEN2,)): ("stablelm2", "hunyuan", "solar-open", "grok-2", "kormo"),
    PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True): ("tekken",),
    PreTokenizer((_GPT4O,)): ("gpt-4o", "llama4", "kanana2", "minimax-m2"),
    PreTokenizer(("[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}+")): (
        "deepseek-llm",
    ),
    PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")): ("deepseek-coder",),
    PreTokenizer(
        (
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            _DEEPSEEK3,
        )
    ): ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
}

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: rule for rule, names in _BY_RULE.items() for name in names}
