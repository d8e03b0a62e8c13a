"""A tokenizer small enough to reason about, behind the protocol that plans count with."""

from dataclasses import dataclass, field

from bench.load.tokenize_client import Messages


@dataclass
class WordTokenizer:
    """A word is a token, one of `long_words` two. A text gets a BOS, a message a header of 4, a prompt 3."""

    long_words: frozenset[str] = frozenset({"island", "mountain"})
    num_calls: int = field(default=0)

    def count_text(self, text: str) -> int:
        self.num_calls += 1
        return 1 + self.words(text)

    def count_messages(self, messages: Messages) -> int:
        self.num_calls += 1
        return 3 + sum(4 + self.words(message["content"]) for message in messages)

    def words(self, text: str) -> int:
        return sum(2 if word in self.long_words else 1 for word in text.split())
