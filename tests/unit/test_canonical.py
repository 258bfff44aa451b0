from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from uuid import UUID

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from kombu.utils import json as kombu_json

from celery_redlock.task.naming.canonical import NotCarried, canonical, path_step, plain

Point = namedtuple("Point", ["x", "y"])  # noqa: PYI024 - what users have


class Colour(str, Enum):
    RED = "red"


class Shout(str, Enum):
    """Its content, which JSON sends, is not its value."""

    HEY = "hey"

    def __new__(cls, text):
        shout = str.__new__(cls, text.upper())
        shout._value_ = text
        return shout


class Size(IntEnum):
    BIG = 3


class Weight(float, Enum):
    HEAVY = 2.5


class Mood(Enum):
    GOOD = "good"


class Money:
    """Travels as plain JSON."""

    def __init__(self, cents):
        self.cents = cents

    def __json__(self):
        return {"cents": self.cents}


class Broken:
    def __json__(self):
        raise RuntimeError("secret-value")


class Mirror:
    """Claims to travel as itself."""

    def __json__(self):
        return self


class Babushka:
    """Always has another one inside."""

    def __json__(self):
        return [Babushka()]


@dataclass
class Line:
    sku: str
    qty: int = 1


@dataclass
class Order:
    id: int
    lines: list[Line] = field(default_factory=list)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
# Few values, many of them confusable, so that equal ones do meet.
TEXTS = [
    "",
    "0",
    "1",
    "1.0",
    "true",
    "True",
    "null",
    "None",
    "nan",
    "[]",
    "{}",
    "\\",
    '"',
    '","',
    "a",
]
UNICODE = ["é", "\ud83d\ude00", "😀", b"a", b"\xff"]
NUMBERS = [0, 0.0, -0.0, False, 1, 1.0, True, None, float("nan"), Decimal(1), Decimal("1.0")]
DAYS = [date(2024, 1, 2), "2024-01-02", datetime(2024, 1, 2, tzinfo=timezone.utc), time(1)]
CONFUSABLE = st.sampled_from([*TEXTS, *UNICODE, *NUMBERS, *DAYS, UUID(int=1), str(UUID(int=1))])


def nested(leaves, keys):
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(keys, inner, max_size=3)
        ),
        max_leaves=8,
    )


CONFUSABLE_TREES = nested(CONFUSABLE, st.sampled_from(["", "a", "b", "1", "a:1", 1, None, True]))
OFFSETS = st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(timezone)
CARRIED = (
    SCALARS
    | st.text(st.characters(categories=["Cs", "Lu", "So"]))
    | st.binary()
    | st.uuids()
    | st.decimals()
    | st.dates()
    | st.times()
    | st.datetimes()
    | st.builds(datetime.replace, st.datetimes(), fold=st.just(1), tzinfo=st.none() | OFFSETS)
    | st.builds(time.replace, st.times(), tzinfo=OFFSETS)
    | st.datetimes(timezones=st.timezones())
    | st.sampled_from([Colour.RED, Size.BIG, Weight.HEAVY, Point(1, "2"), Money(5)])
)
ENVELOPES = st.fixed_dictionaries(
    {
        "__type__": st.sampled_from(
            ["uuid", "decimal", "bytes", "base64", "date", "datetime", "x"]
        ),
        "__value__": st.sampled_from([" 1.0 ", "aGk=", "2024-01-02", 7, {"hex": "0" * 32}, None]),
    }
)
KEYS = st.text() | st.integers() | st.floats() | st.booleans() | st.none() | st.just(Colour.RED)
MESSAGES = nested(CARRIED | ENVELOPES, KEYS)


def read_by_worker(value):
    return kombu_json.loads(kombu_json.dumps(value))


def tagged(read):
    """Return what is equal for equal values of equal types only; an oracle of its own."""
    if isinstance(read, dict):
        return "dict", frozenset((key, tagged(item)) for key, item in read.items())
    if isinstance(read, list):
        return "list", tuple(tagged(item) for item in read)
    return type(read), repr(read)


def refusal(value):
    with pytest.raises(NotCarried) as refused:
        canonical(value)
    return refused.value


class TestWhatIsEqual:
    @given(CONFUSABLE_TREES, CONFUSABLE_TREES)
    @example([1], [[1]])
    @example({"a": "b,c:d"}, {"a": "b", "c": "d"})
    @example(["a", "b"], ['a","b'])
    def test_texts_are_equal_exactly_when_a_worker_reads_equal_values(self, one, other):
        try:
            texts = canonical(one), canonical(other)
        except NotCarried:
            assume(False)  # two keys that are one in JSON; has its own test
        equal = tagged(read_by_worker(one)) == tagged(read_by_worker(other))
        assert (texts[0] == texts[1]) is equal

    @given(MESSAGES)
    @example({"__type__": "decimal", "__value__": " 1.0 "})
    @example({"__type__": "base64", "__value__": "aGk="})
    @example({"a": [{"__type__": "uuid", "__value__": {"hex": "0" * 32}}]})
    @example(datetime(2024, 10, 27, 2, 30, fold=1))  # noqa: DTZ001
    @example("\ud83d\ude00")
    def test_the_journey_to_a_worker_changes_no_text(self, value):
        try:
            text = canonical(value)
        except NotCarried:
            text = None
        try:
            read = read_by_worker(value)
        except Exception:  # noqa: BLE001 - whatever hinders the worker
            assert text is None
        else:
            assert text in (None, canonical(read))

    @given(nested(CARRIED, st.text()))
    def test_everything_that_kombu_carries_has_a_text(self, value):
        """With text keys and no forged envelopes nothing is refused."""
        assert canonical(value).isascii()

    @given(st.dictionaries(st.text(), SCALARS))
    def test_the_order_of_a_dict_does_not_matter(self, value):
        assert canonical(value) == canonical(dict(reversed(value.items())))

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ((1, 2), [1, 2]),
            (Point(1, 2), [1, 2]),
            (OrderedDict(a=1), {"a": 1}),
            ({1: "x"}, {"1": "x"}),
            ({True: "x", None: "y", 1.5: "z"}, {"true": "x", "null": "y", "1.5": "z"}),
            ({float("inf"): 1, Size.BIG: 2}, {"Infinity": 1, "3": 2}),
            (Colour.RED, "red"),
            (Size.BIG, 3),
            (Weight.HEAVY, 2.5),
            (Money(5), {"cents": 5}),
            ([Money(5)], [{"cents": 5}]),
            (Order(1, [Line("a")]), {"id": 1, "lines": [{"sku": "a", "qty": 1}]}),
        ],
    )
    def test_a_client_value_and_its_plain_form_are_one(self, one, other):
        assert canonical(one) == canonical(other)

    def test_every_plain_type_is_told_apart(self):
        values = [1, "1", True, 1.0, Decimal(1), b"1", None, "None", "null", [1], {"1": 1}]
        assert len({canonical(value) for value in values}) == len(values)

    def test_nan_is_equal_to_itself_and_to_nothing_else(self):
        nan, inf = canonical(float("nan")), canonical(float("inf"))
        assert nan == canonical(float("nan"))
        assert len({nan, inf, canonical("NaN"), canonical(-float("inf"))}) == 4

    def test_the_same_instant_at_another_offset_is_another_value(self):
        """An offset is part of what the task gets, so it is part of the text."""
        utc = datetime(2024, 1, 2, 12, tzinfo=timezone.utc)
        assert canonical(utc) != canonical(utc.astimezone(timezone(timedelta(hours=1))))


class TestRegisteredTypes:
    @pytest.fixture(autouse=True)
    def registry(self, monkeypatch):
        monkeypatch.setattr(kombu_json, "_encoders", dict(kombu_json._encoders))
        monkeypatch.setattr(kombu_json, "_decoders", dict(kombu_json._decoders))

    def test_a_type_with_a_marker_keeps_its_text_on_the_way(self):
        kombu_json.register_type(complex, "complex", str, complex)
        assert canonical(1j) == canonical(read_by_worker(1j))
        assert canonical(1j) != canonical(str(1j))

    def test_a_type_without_a_marker_is_its_plain_form(self):
        """Marker None means that the worker gets the plain value."""
        kombu_json.register_type(complex, None, str)
        assert canonical([1j]) == canonical([str(1j)])

    def test_a_type_without_a_decoder_is_its_plain_form(self):
        """What the worker gets as text is text, envelope or not."""
        kombu_json.register_type(complex, "complex", str)
        assert canonical(1j) == canonical(str(1j))

    def test_what_a_decoder_makes_of_a_value_counts(self):
        kombu_json.register_type(complex, "c", lambda c: int(c.real), lambda n: UUID(int=n))
        assert canonical(7 + 0j) == canonical(UUID(int=7))
        kombu_json.register_type(complex, "c", str, len)
        assert canonical(1j) == canonical(2)
        kombu_json.register_type(complex, "c", lambda c: int(c.real), lambda n: UUID(int=n))
        kombu_json.register_type(UUID, None, str)
        assert canonical(7 + 0j) == canonical(str(UUID(int=7)))

    def test_a_registered_type_may_replace_a_default_one(self):
        kombu_json.register_type(date, None, date.isoformat)
        assert canonical(date(2024, 1, 2)) == canonical("2024-01-02")


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        "value",
        [{1}, object(), Mood.GOOD, len, 1j, UserDict(), bytearray(b"a"), range(2), Line, Broken()],
    )
    def test_the_type_is_named(self, value):
        assert refusal(value).reason == f"is of type {type(value).__qualname__}"

    @pytest.mark.parametrize(
        ("value", "path"),
        [
            (object(), ""),
            ({"items": [1, 2, 3, {1}]}, ".items[3]"),
            ([{"a": ({1},)}], "[0].a[0]"),
            (Order(1, [Line({1})]), ".lines[0].sku"),
            ({"jane@example.org": {1}}, "[...]"),
        ],
    )
    def test_the_place_is_named(self, value, path):
        assert refusal(value).path == path

    def test_no_value_is_shown(self):
        refused = refusal({"a": Broken(), "token": "secret-value"})
        assert "secret-value" not in f"{refused!r} {refused.reason} {refused.path}"

    def test_two_keys_that_are_one_in_json_are_refused(self):
        """Which of the two a worker reads is chance."""
        assert refusal({"a": {1: "x", "1": "y"}}).reason == "has two keys that are one in JSON"

    def test_a_key_that_json_has_not_is_refused(self):
        assert refusal([{(1, 2): 3}]).reason == "has a key of type tuple"

    def test_an_envelope_that_no_worker_can_open_is_refused(self):
        """A dict that looks like an envelope of an unknown type would never arrive."""
        forged = {"__type__": "nonsense", "__value__": 1}
        assert refusal([forged]).reason == "is an envelope that kombu cannot open"

    def test_an_integer_too_long_for_json_is_refused(self):
        assert refusal([10**5000]).reason == "is an integer too long for JSON"

    def test_what_contains_itself_is_refused(self):
        ring = [1]
        ring.append({"again": ring})
        assert (refusal(ring).reason, refusal(ring).path) == ("contains itself", "[1].again")
        assert refusal(Mirror()).reason == "contains itself"

    def test_what_has_no_end_is_refused(self):
        """Too deep a value is a refusal like any other, never a RecursionError."""
        deep = []
        for _ in range(100_000):
            deep = [deep]
        assert refusal(deep).reason == "is nested too deeply"
        assert isinstance(refusal(Babushka()), NotCarried)

    def test_one_value_at_two_places_is_no_circle(self):
        shared = [1]
        assert canonical([shared, shared]) == canonical([[1], [1]])


class TestModels:
    @pytest.fixture
    def pydantic(self):
        return pytest.importorskip("pydantic")

    def test_a_model_is_its_json_dump(self, pydantic):
        thing = pydantic.create_model("Thing", id=(UUID, ...), sizes=(set[int], ...))
        model = thing(id=UUID(int=1), sizes={1})
        assert canonical([model]) == canonical([{"id": str(UUID(int=1)), "sizes": [1]}])

    def test_a_masked_secret_is_refused(self, pydantic):
        """Two secrets that dump alike must not share a lock."""
        login = pydantic.create_model("Login", password=(pydantic.SecretStr, ...))
        refused = refusal([login(password="hunter2")])
        assert refused.reason == "is a model with a secret that its JSON form masks"

    def test_a_model_that_cannot_be_dumped_is_refused(self, pydantic):
        config = pydantic.ConfigDict(arbitrary_types_allowed=True)
        thing = pydantic.create_model("Thing", __config__=config, it=(object, ...))
        assert refusal(thing(it=object())).reason == "is a model that pydantic cannot dump as JSON"

    def test_pydantic_is_not_imported_for_it(self):
        code = """if True:
            import sys
            from celery_redlock.task.naming.canonical import NotCarried, canonical
            try:
                canonical(object())
            except NotCarried:
                print("pydantic" in sys.modules)
        """
        command = [sys.executable, "-c", code]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        assert run.stdout == "False\n"


class TestPlain:
    @given(
        SCALARS | st.uuids() | st.decimals() | st.dates() | st.datetimes(timezones=st.timezones())
    )
    def test_the_journey_to_a_worker_changes_no_printed_text(self, value):
        assert str(plain(value)) == str(plain(read_by_worker(value)))

    def test_a_zone_prints_the_same_on_both_sides(self):
        """A zone's name does not travel, so it is not printed: only the offset is."""
        zoned = datetime(2024, 7, 1, tzinfo=timezone(timedelta(hours=2), "CEST"))
        assert f"{plain(zoned):%Z}" == "UTC+02:00"

    @pytest.mark.parametrize(
        ("value", "printed"),
        [
            (Colour.RED, "red"),
            (Size.BIG, "3"),
            (Weight.HEAVY, "2.5"),
            (Shout.HEY, "HEY"),
            (Mood.GOOD, "good"),
            (None, "None"),
        ],
    )
    def test_an_enum_prints_what_json_makes_of_it(self, value, printed):
        """Mostly its value, whatever the Python version makes of ``str(enum)``."""
        assert str(plain(value)) == printed

    @pytest.mark.parametrize("value", [[], {}, (), b"a", object(), {1}, len, Money(1), Line("a")])
    def test_what_has_no_text_of_its_own_is_refused(self, value):
        with pytest.raises(NotCarried, match=f"is of type {type(value).__qualname__}"):
            plain(value)


@pytest.mark.parametrize(
    ("key", "step"),
    [(3, "[3]"), ("sku", ".sku"), ("a b", "[...]"), (True, "[...]"), (None, "[...]")],
)
def test_a_path_shows_names_and_indexes_only(key, step):
    """Any other key may be somebody's data."""
    assert path_step(key) == step
