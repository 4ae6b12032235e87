"""Text as it streams: whole characters, stop strings held back only as far as they must be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagetrie.engine.text_stream import TextStream


class Bytes:
    """One token per byte, and 256 for a special token."""

    vocab_size = 257
    eos_ids = frozenset({256})
    special_ids = frozenset({256})

    def token_bytes(self, token_id: int) -> bytes:
        return b"<end>" if token_id == 256 else bytes([token_id])


class Pieces(Bytes):
    """Token i is the i-th of the given pieces."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id].encode()


def stream(pieces: list[str], stops: list[str]) -> tuple[list[str], TextStream]:
    text = TextStream(Pieces(pieces), stops, skip_special=True)
    out = []
    for token in range(len(pieces)):
        out.append(text.push(token))
        if text.stopped is not None:
            break
    out.append(text.finish())
    return out, text


@given(st.text())
def test_byte_by_byte_gives_whole_characters(text: str) -> None:
    out = TextStream(Bytes(), [], skip_special=True)
    pieces = [out.push(byte) for byte in text.encode("utf-8", "surrogatepass")]
    pieces.append(out.finish())
    if not any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        assert "".join(pieces) == text
        assert all("�" not in piece or "�" in text for piece in pieces)


def test_a_broken_tail_is_shown_once_at_the_end() -> None:
    out = TextStream(Bytes(), [], skip_special=True)
    euro = "€".encode()
    assert [out.push(b) for b in euro[:2]] == ["", ""]
    assert out.finish() == "�"


def test_special_tokens_are_hidden_on_request_only() -> None:
    hidden, shown = (TextStream(Bytes(), [], skip_special=skip) for skip in (True, False))
    assert hidden.push(256) == ""
    assert shown.push(256) == "<end>"


def test_stop_split_over_tokens_leaks_nothing() -> None:
    out, text = stream(["br", "own", " f", "ox", " jumps"], ["own fox"])
    assert "".join(out) == "br"
    assert text.stopped == "own fox"


def test_only_a_possible_beginning_is_held_back() -> None:
    out, text = stream(["a", "b", "x", "a"], ["abc"])
    assert out == ["", "", "abx", "", "a"]
    assert text.stopped is None


def test_overlapping_stops_and_leftmost_match() -> None:
    assert "".join(stream(["x", "a", "b", "c"], ["abc", "ab"])[0]) == "x"
    assert "".join(stream(["one END two STOP"], ["STOP", "END"])[0]) == "one "
    assert "".join(stream(["END"], ["END"])[0]) == ""


def test_the_end_flushes_what_was_held() -> None:
    out, text = stream(["Is it", "?"], ["? No"])
    assert "".join(out) == "Is it?"
    assert text.stopped is None


@given(
    st.lists(st.text(alphabet="ab€", min_size=1, max_size=3), max_size=12),
    st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), max_size=3),
)
def test_streamed_text_has_no_stop_and_loses_nothing(pieces: list[str], stops: list[str]) -> None:
    out, text = stream(pieces, stops)
    joined, whole = "".join(out), "".join(pieces)
    assert whole.startswith(joined)
    assert not any(stop in joined for stop in stops)
    if text.stopped is None:
        assert joined == whole
        assert not any(stop in whole for stop in stops)
    else:
        assert whole.startswith(joined + text.stopped)


@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=12),
    st.lists(st.text(alphabet="ab", min_size=2, max_size=4), min_size=1, max_size=3),
)
def test_nothing_is_held_that_could_be_shown(pieces: list[str], stops: list[str]) -> None:
    text = TextStream(Pieces(pieces), stops, skip_special=True)
    shown = ""
    for token in range(len(pieces)):
        shown += text.push(token)
        if text.stopped is not None:
            return
        held = "".join(pieces[: token + 1])[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@given(st.lists(st.lists(st.sampled_from([65, 66, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 256]), max_size=12), max_size=4))
def test_what_streams_share_changes_no_text(texts: list[list[int]]) -> None:
    """Known pieces stand for their bytes only between characters, whatever broken text came before."""
    shared: dict[bool, dict[int, str]] = {True: {}, False: {}}
    for tokens in texts:
        for skip in (True, False):
            fast = TextStream(Bytes(), [], skip_special=skip, pieces=shared[skip])
            data = b"".join(Bytes().token_bytes(token) for token in tokens if token != 256 or not skip)
            assert "".join(map(fast.push, tokens)) + fast.finish() == data.decode(errors="replace")
