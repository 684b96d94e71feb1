"""Which ranks are profiled, and in words why or why not."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from rankscope.ranges import compact, expand

FORMS = 'numbers, "0-7,16", "all", "none", "per_node" or "tp=0,pp=last"'
"""How ranks can be written, for messages."""

Coordinate = tuple[str, "int | Literal['last', '*']"]

_COORDINATE = re.compile(r"([A-Za-z_]\w*)\s*=\s*(\d+|last|\*)")


@dataclasses.dataclass(frozen=True)
class Selection:
    """The answer for one rank.

    Attributes:
        selected: whether this rank is profiled.
        reason: a few words for people.
    """

    selected: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Term:
    """Conditions that a rank meets all together.

    Attributes:
        ranks: it is one of these; None is no condition.
        per_node: it is the first of its node (local rank 0).
        coordinates: its place in parallel dimensions, e.g. ``(("tp", 0), ("pp", "last"))``.
    """

    ranks: frozenset[int] | None = None
    per_node: bool = False
    coordinates: tuple[Coordinate, ...] = ()

    @property
    def local(self) -> bool:
        """Whether only the process itself can tell (its node, its topology)."""
        return self.per_node or bool(self.coordinates)

    @functools.cached_property
    def text(self) -> str:
        """The term as `RankSelector.parse` reads it, shortened when it names many ranks."""
        return "&".join(self._atoms(self.numbers if self.ranks is not None else None))

    @functools.cached_property
    def numbers(self) -> str:
        """The listed ranks, shortened; kept, because ten thousand ranks may ask for their reason."""
        return compact(sorted(self.ranks or ()))

    def _atoms(self, ranks: str | None) -> list[str]:
        atoms = [] if ranks is None else [ranks]
        if self.per_node:
            atoms.append("per_node")
        atoms.extend(f"{name}={place}" for name, place in self.coordinates)
        return atoms or ["all"]

    def written(self) -> list[int | str]:
        """The term as items of a list that `RankSelector.parse` reads back to the same."""
        if self.ranks is None:
            return ["&".join(self._atoms(None))]
        if not self.local:
            return [*sorted(self.ranks)]
        return ["&".join(self._atoms(str(rank))) for rank in sorted(self.ranks)]

    def both(self, other: Term) -> Term | None:
        """What meets both terms; None when nothing can."""
        ranks = self.ranks if other.ranks is None else other.ranks if self.ranks is None else self.ranks & other.ranks
        if ranks is not None and not ranks:
            return None
        coordinates = tuple(sorted({*self.coordinates, *other.coordinates}, key=str))
        fixed = [name for name, place in coordinates if isinstance(place, int)]
        if len(fixed) != len(set(fixed)):
            return None
        return Term(ranks, self.per_node or other.per_node, coordinates)

    def named(self) -> str:
        """``rank 3`` or ``ranks 0-7``."""
        return f"{'rank' if len(self.ranks or ()) == 1 else 'ranks'} {self.numbers}"

    def why_not(
        self,
        rank: int,
        topology: Mapping[str, int],
        sizes: Mapping[str, int],
        local_rank: int | None,
    ) -> str:
        """The first condition that the rank does not meet, in words; empty when it meets all."""
        if self.ranks is not None and rank not in self.ranks:
            return f"rank {rank} is not {'' if len(self.ranks) == 1 else 'in '}{self.named()}"
        if self.per_node and local_rank is None:
            return "the local rank is unknown, so per_node selects nobody"
        if self.per_node and local_rank != 0:
            return f"local rank {local_rank} is not the first of its node"
        for name, place in self.coordinates:
            if name not in topology:
                return f"dimension {name!r} is unknown here (known: {', '.join(topology) or 'none'})"
            if place == "last" and name not in sizes:
                return f"the size of dimension {name!r} is unknown, so {name}=last selects nobody"
            wanted = sizes[name] - 1 if place == "last" else place
            if place != "*" and topology[name] != wanted:
                return f"{name}={topology[name]} is not {name}={place}"
        return ""


@dataclasses.dataclass(frozen=True)
class RankSelector:
    """A set of ranks: listed ones, all, none, by node or by place in the topology.

    Attributes:
        terms: a rank is selected when it meets one of them; no term selects nobody.
        default: nobody chose; rank 0 stands in. Merging treats it as rank 0.
    """

    terms: tuple[Term, ...]
    default: bool = False

    @classmethod
    def parse(cls, ranks: Any = None, all_ranks: bool = False) -> RankSelector:
        """Read a role's ``ranks`` and ``all_ranks``.

        Args:
            ranks: None or nothing (rank 0 by default); a number; a text: ``"0-7,16"``, ``"all"``, ``"none"``,
                ``"per_node"`` (local rank 0 of each node), ``"tp=0,pp=last"`` (all of these coordinates; a number,
                ``last`` or ``*``), parts joined by ``&`` (all of them); or a list of numbers and such texts.
            all_ranks: select every rank, whatever ``ranks`` says (which is still checked).

        Raises:
            ValueError: anything else; the message quotes the piece that is wrong.
        """
        terms = _merged(_terms(ranks))
        if all_ranks:
            return EVERY_RANK
        if terms is None:
            return DEFAULT
        return cls(terms)

    @property
    def all(self) -> bool:
        """Whether every rank is selected."""
        return Term() in self.terms

    @property
    def nobody(self) -> bool:
        """Whether no rank can be selected."""
        return not self.terms

    @property
    def local(self) -> bool:
        """Whether the answer for some ranks depends on their node or topology."""
        return not self.all and any(term.local for term in self.terms)

    def selects(
        self,
        rank: int,
        *,
        world_size: int | None = None,
        topology: Mapping[str, int] | None = None,
        topology_sizes: Mapping[str, int] | None = None,
        local_rank: int | None = None,
    ) -> Selection:
        """Whether the rank is selected, and why.

        Args:
            rank: global rank.
            world_size: number of ranks; a rank outside of it is never selected.
            topology: the rank's place in each known dimension, e.g. ``{"tp": 0, "pp": 1}``.
            topology_sizes: size of each known dimension; needed for ``last``.
            local_rank: rank in its node; needed for ``per_node``.
        """
        if rank < 0 or (world_size is not None and rank >= world_size):
            return Selection(False, f"rank {rank} does not exist: the world size is {world_size}")
        if not self.terms:
            return Selection(False, "no rank is selected")
        reasons = []
        for term in self.terms:
            reason = term.why_not(rank, topology or {}, topology_sizes or {}, local_rank)
            if not reason:
                return Selection(True, self._yes(rank, term))
            reasons.append(reason)
        if self.default:
            return Selection(False, f"rank {rank} is not rank 0, the default; set ranks or all_ranks")
        return Selection(False, "; ".join(reasons))

    def beforehand(self) -> RankSelector:
        """The ranks that may be selected, as far as can be known before a process knows its place in the topology."""
        terms = [dataclasses.replace(term, coordinates=(), per_node=False) for term in self.terms]
        return RankSelector(_merged(terms) or (), self.default)

    def _yes(self, rank: int, term: Term) -> str:
        if self.default:
            return "rank 0 is the default"
        if term == Term():
            return "all ranks are selected"
        if not term.local:
            return f"rank {rank} is {'listed' if len(term.ranks or ()) == 1 else 'in ' + term.named()}"
        return f"rank {rank} meets {term.text}"

    def listed(self) -> tuple[int, ...] | None:
        """The ranks in ascending order when they are all listed by number, else None."""
        if any(term.local or term.ranks is None for term in self.terms):
            return None
        return tuple(sorted(frozenset[int]().union(*(term.ranks or () for term in self.terms))))

    def warnings(self, world_size: int) -> list[str]:
        """What in this selector cannot be meant, once the number of ranks is known."""
        named = sorted({rank for term in self.terms for rank in term.ranks or () if rank >= world_size})
        if not named:
            return []
        noun = "rank" if len(named) == 1 else "ranks"
        verb = "does" if len(named) == 1 else "do"
        return [f"{noun} {compact(named)} {verb} not exist: the world size is {world_size} (ranks 0-{world_size - 1})"]

    def union(self, other: RankSelector) -> RankSelector:
        """Ranks of either; the default counts as rank 0."""
        if self == other:
            return self
        return RankSelector(_merged([*self.terms, *other.terms]) or ())

    def intersection(self, other: RankSelector) -> RankSelector:
        """Ranks of both; nobody when there are none. The default counts as rank 0."""
        if self == other:
            return self
        pairs = (one.both(two) for one, two in itertools.product(self.terms, other.terms))
        return RankSelector(_merged([term for term in pairs if term is not None]) or ())

    def written(self) -> tuple[int | str, ...]:
        """As items of a list that `parse` reads back to the same ranks."""
        return tuple(item for term in self.terms for item in term.written()) or ("none",)

    def explain(self) -> str:
        """The selector in words."""
        if self.default:
            return "rank 0 (the default)"
        if self.all:
            return "all ranks"
        return " or ".join(self._words(term) for term in self.terms) or "no rank"

    @staticmethod
    def _words(term: Term) -> str:
        words = []
        if term.ranks is not None:
            words.append(term.named())
        if term.per_node:
            words.append("local rank 0 of each node")
        if term.coordinates:
            words.append(f"ranks with {','.join(f'{name}={place}' for name, place in term.coordinates)}")
        return " that are also ".join(words)


EVERY_RANK = RankSelector((Term(),))
NO_RANK = RankSelector(())
DEFAULT = RankSelector((Term(frozenset({0})),), default=True)


def _terms(ranks: Any) -> list[Term] | None:
    """The terms as written; None where nothing was chosen."""
    if ranks is None:
        return None
    if isinstance(ranks, str):
        return _from_text(ranks)
    if isinstance(ranks, int | float):
        return [_single(ranks)]
    if not isinstance(ranks, Iterable) or isinstance(ranks, Mapping | bytes):
        raise ValueError(f"cannot read {ranks!r} as ranks; write {FORMS}")
    items = list(ranks)
    if not items:
        return None
    terms: list[Term] = []
    numbers: set[int] = set()
    for item in items:
        if isinstance(item, str) and item.strip():
            if item.strip().lower() == "none" and len(items) > 1:
                raise ValueError("'none' cannot be joined with other ranks")
            terms.extend(_from_text(item) or ())
        elif isinstance(item, int | float):
            numbers |= _single(item).ranks or set()
        else:
            raise ValueError(f"cannot read {item!r} as a rank; write {FORMS}")
    return [*([Term(frozenset(numbers))] if numbers else []), *terms]


def _single(rank: float) -> Term:
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise ValueError(f"{rank!r} is not a rank; write a whole number of at least 0")
    if rank < 0:
        raise ValueError(f"{rank} is not a rank: ranks count from 0")
    return Term(frozenset({rank}))


def _from_text(text: str) -> list[Term] | None:
    word = text.strip().lower()
    if not word:
        return None
    if word == "all":
        return [Term()]
    if word == "none":
        return []
    if "=" in word or "&" in word:
        return [_conjunction(text.strip())]
    terms: list[Term] = []
    numbers: set[int] = set()
    for piece in word.split(","):
        if piece.strip() == "per_node":
            terms.append(Term(per_node=True))
        else:
            numbers.update(_expanded(piece))
    return [*([Term(frozenset(numbers))] if numbers else []), *terms]


def _conjunction(text: str) -> Term:
    ranks: frozenset[int] | None = None
    per_node = False
    coordinates: list[Coordinate] = []
    for part in re.split(r"[,&]", text):
        atom = part.strip()
        match = _COORDINATE.fullmatch(atom)
        if match is not None:
            coordinates.append((match[1], int(match[2]) if match[2].isdigit() else match[2]))  # type: ignore[arg-type]
        elif "=" in atom:
            raise ValueError(f"cannot read {atom!r}; a coordinate is a number, last or *, e.g. tp=0,pp=last")
        elif atom.lower() == "per_node":
            per_node = True
        elif "," in text:
            raise ValueError(f"{atom!r} beside coordinates in {text!r}; write a list, one item for each choice")
        elif ranks is None:
            ranks = frozenset(_expanded(atom))
        else:
            raise ValueError(f"{text!r} names ranks twice")
    names = [name for name, _ in coordinates]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{text!r} names {name!r} twice; write a list, one item for each choice")
    return Term(ranks, per_node, tuple(coordinates))


def _expanded(piece: str) -> list[int]:
    try:
        numbers = list(expand(piece, least=0))
    except ValueError as error:
        if "cannot read" in str(error):
            raise ValueError(f"cannot read {piece.strip()!r} as ranks; write {FORMS}") from None
        raise
    if not numbers:
        raise ValueError(f"cannot read {piece!r} as ranks; write {FORMS}")
    return numbers


def _merged(terms: list[Term] | None) -> tuple[Term, ...] | None:
    """Listed ranks as one term in front; the others once each."""
    if terms is None:
        return None
    if Term() in terms:
        return (Term(),)
    listed = [term.ranks for term in terms if not term.local and term.ranks is not None]
    ranks = frozenset[int]().union(*listed)
    others = dict.fromkeys(term for term in terms if term.local)
    return (*((Term(ranks),) if ranks else ()), *others)
