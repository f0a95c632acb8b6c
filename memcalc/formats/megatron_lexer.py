"""The words of a bash script: what is quoted, what is a variable, where a command ends. Nothing is executed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

_SPACE: Final = " \t\r"
_ENDS: Final = "\n;&|"
_IN_DOUBLE: Final = '"\\$`\n'


class Piece(NamedTuple):
    """A part of a word. `kind` is "bare", "quoted", "variable" or "quoted variable"; a variable's text is what stands
    between `${` and `}`, or "((A*B))", or "(command)"."""

    kind: str
    text: str


class Word(NamedTuple):
    """A word of a command."""

    pieces: tuple[Piece, ...]
    array: tuple[Word, ...] | None = None
    """The elements that are assigned: NAME=(a b)."""


class _Lexer:
    def __init__(self, text: str, *, ends: str = _ENDS + "()<>", space: str = _SPACE) -> None:
        """Read a script's text. `ends` end a word and are no part of it, besides `space`."""
        self.text, self.at, self.ends, self.space = text.replace("\r\n", "\n"), 0, ends, space
        self.heredocs: list[str] = []
        self.operator = ""
        """The sign that ended the last command: "&&", "||" or another sign."""

    def peek(self, length: int = 1) -> str:
        return self.text[self.at : self.at + length]

    def command(self) -> list[Word]:
        """Return the words up to the end of a command."""
        words: list[Word] = []
        self.operator = ""
        while self.at < len(self.text):
            self.skip()
            char = self.peek()
            if not char:
                break
            if char in _ENDS:
                self._end(char)
                break
            if char in "<>" or (char.isdigit() and self.peek(2)[1:] in ("<", ">")):
                self._redirection()
                continue
            if char in "()":
                self.at += 1
                if words and char == "(" and self.peek() == ")" and len(words[-1].pieces) == 1:
                    self.at += 1
                    words[-1] = Word((Piece("bare", words[-1].pieces[0].text + "()"),))
                    continue
                break
            words.append(self.word())
        return words

    def skip(self) -> None:
        """Skip spaces, continued lines and comments."""
        while self.at < len(self.text):
            if self.peek() in self.space:
                self.at += 1
            elif self.peek(2) == "\\\n":
                self.at += 2
            elif self.peek() == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def _end(self, char: str) -> None:
        self.operator = char
        self.at += 1
        if char in "&|" and self.peek() == char:
            self.operator = 2 * char
            self.at += 1
            return
        if char == "&" and self.peek() == ">":
            self._redirection()
        if char != "\n":
            return
        for mark in self.heredocs:
            line = None
            while line != mark and self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line, self.at = self.text[self.at : end].strip(), end + 1
        self.heredocs = []

    def _redirection(self) -> None:
        """Skip an operator and the file it names. A here-document's mark is noted."""
        start = self.at
        while self.peek() and self.peek() in "0123456789<>&|-":
            self.at += 1
        operator = self.text[start : self.at]
        self.skip()
        if "&" in operator[1:] and operator[-1] != "&":  # 2>&1
            return
        if self.peek() and self.peek() not in _ENDS + "()":
            name = self.word()
            if "<<" in operator and "<<<" not in operator:
                self.heredocs.append("".join(piece.text for piece in name.pieces))
        elif self.peek() in ("(", ")"):
            self.at += 1

    def word(self) -> Word:
        pieces: list[Piece] = []
        array: tuple[Word, ...] | None = None
        start = self.at
        while self.at < len(self.text):
            char = self.peek()
            if char == "(" and "(" in self.ends and len(pieces) == 1 and _assigns(pieces[0]):
                self.at += 1
                array = self._array()
                break
            if char in self.space or char in self.ends:
                break
            if char == "\\":
                if self.peek(2) != "\\\n":
                    pieces.append(Piece("quoted", self.peek(2)[1:]))
                self.at += 2
            elif char == "'":
                end = self.text.find("'", self.at + 1)
                end = len(self.text) if end < 0 else end
                pieces.append(Piece("quoted", self.text[self.at + 1 : end]))
                self.at = end + 1
            elif char == '"':
                pieces += self._double()
            elif char in "$`":
                pieces.append(self._variable(quoted=False))
            else:
                pieces.append(Piece("bare", self._run_of_characters()))
        if self.at == start:
            self.at += 1
        return Word(tuple(pieces), array)

    def _run_of_characters(self) -> str:
        start = self.at
        while self.at < len(self.text) and self.peek() not in self.space + self.ends + "\\'\"$`":
            self.at += 1
        return self.text[start : self.at]

    def _array(self) -> tuple[Word, ...]:
        words: list[Word] = []
        while self.at < len(self.text):
            self.skip()
            char = self.peek()
            if char == ")":
                self.at += 1
                break
            if not char or char in "\n;&|(<>":
                self.at += 1
                continue
            words.append(self.word())
        return tuple(words)

    def _double(self) -> list[Piece]:
        """Return the pieces between double quotes."""
        pieces, text = list[Piece](), ""
        self.at += 1
        while self.at < len(self.text) and self.peek() != '"':
            char = self.peek()
            if char == "\\" and self.peek(2)[1:] in _IN_DOUBLE and len(self.peek(2)) == 2:
                text += "" if self.peek(2) == "\\\n" else self.peek(2)[1]
                self.at += 2
            elif char in "$`":
                if text:
                    pieces.append(Piece("quoted", text))
                    text = ""
                pieces.append(self._variable(quoted=True))
            else:
                text += char
                self.at += 1
        self.at += 1
        if text or not pieces:
            pieces.append(Piece("quoted", text))
        return pieces

    def _variable(self, *, quoted: bool) -> Piece:
        kind = "quoted variable" if quoted else "variable"
        if self.peek() == "`":
            end = self.text.find("`", self.at + 1)
            end = len(self.text) - 1 if end < 0 else end
            text, self.at = self.text[self.at + 1 : end], end + 1
            return Piece(kind, f"({text})")
        if self.peek(2) == "${":
            return Piece(kind, self._balanced("{", "}"))
        if self.peek(2) == "$(":
            return Piece(kind, f"({self._balanced('(', ')')})")
        self.at += 1
        start = self.at
        if self.peek() and self.peek() in "@*#?!0123456789$-":
            self.at += 1
        else:
            while self.peek().isalnum() or self.peek() == "_":
                self.at += 1
        name = self.text[start : self.at]
        return Piece(kind, name) if name else Piece("quoted" if quoted else "bare", "$")

    def _balanced(self, opening: str, closing: str) -> str:
        """Return the text between two brackets that belong together. The lexer is at the dollar sign."""
        self.at += 2
        start, depth = self.at, 1
        while self.at < len(self.text) and depth:
            depth += (self.peek() == opening) - (self.peek() == closing)
            self.at += 1
        return self.text[start : self.at - 1] if not depth else self.text[start:]


def _assigns(piece: Piece) -> bool:
    return piece.kind == "bare" and piece.text.endswith("=")


def words_of(text: str) -> list[Word]:
    """Return the words of a text that has no commands: lines belong together, and only spaces are between words."""
    lexer, words = _Lexer(text, ends="", space=_SPACE + "\n"), list[Word]()
    while lexer.at < len(lexer.text):
        lexer.skip()
        if lexer.peek():
            words.append(lexer.word())
    return words


def commands_of(text: str) -> Iterator[tuple[list[Word], str]]:
    """Yield the words of each command of a script, and what ends it: "&&", "||" or another sign."""
    lexer = _Lexer(text)
    while lexer.at < len(lexer.text):
        before = lexer.at
        words = lexer.command()
        if words:
            yield words, lexer.operator
        elif lexer.at == before:
            lexer.at += 1
