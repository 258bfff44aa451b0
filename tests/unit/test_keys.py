from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum
from hashlib import sha256
from uuid import UUID

import pytest
from celery import Celery
from hypothesis import assume, given
from hypothesis import strategies as st
from kombu.utils import json as kombu_json

from celery_redlock.errors import ConfigurationError, LockKeyError
from celery_redlock.task.naming.keys import LockName
from support.versions import before, since


class Colour(str, Enum):
    RED = "red"


@dataclass
class Order:
    id: int
    note: object = None

    def total(self):
        return self.id

    @property
    def broken(self):
        raise RuntimeError("secret-value")


def task_of(body, **options):
    app = Celery("t", set_as_current=False)
    return app.task(**{"name": "shop.task", "shared": False, **options})(body)._get_current_object()


def pair(a, b):
    """Body with two parameters."""


#: Two texts made of what could end a field or stand for it.
pairs = st.tuples(*[st.text(":-%,. /{=a→_\N{EN DASH}3AD", min_size=1, max_size=6)] * 2)


def namer(body, lock_key=None, unique_on=None, **options):
    return LockName.of_task(task_of(body, **options), lock_key=lock_key, unique_on=unique_on)


def name_of(names, *args, **kwargs):
    return names.name(args, kwargs)


def on_worker(args, kwargs):
    return kombu_json.loads(kombu_json.dumps((args, kwargs)))


def refusal(names, *args, **kwargs):
    with pytest.raises(LockKeyError) as refused:
        names.name(args, kwargs)
    return str(refused.value)


def misfit(body, **options):
    with pytest.raises(ConfigurationError) as refused:
        namer(body, **options)
    return str(refused.value)


def bill(invoice_id, *, dry_run=False):
    """Body with a positional and a keyword-only parameter."""


def fetch(url, *paths, depth=1, **headers):
    """Body that takes anything."""


def nothing():
    """Body without parameters."""


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(0, 2)
    | st.sampled_from([1.0, "1", "True", UUID(int=1)]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=4,
)


class TestDefaultName:
    def test_it_is_the_task_name_and_a_digest(self):
        name = name_of(namer(bill), "secret-value")
        task, digest = name.split(":")
        assert (task, len(digest)) == ("shop.task", 32)
        assert set(digest) <= set("0123456789abcdef")

    def test_it_is_the_same_in_every_release(self):
        """Two releases of this package in one cluster agree on the lock."""
        digest = sha256(b'{"dry_run":false,"invoice_id":7}').hexdigest()
        assert name_of(namer(bill), 7) == f"shop.task:{digest[:32]}"

    def test_ways_to_write_one_call_have_one_name(self):
        def body(a, b=2):
            pass

        names = namer(body)
        calls = [
            name_of(names, 1),
            name_of(names, a=1),
            name_of(names, 1, 2),
            name_of(names, b=2, a=1),
        ]
        assert len(set(calls)) == 1

    def test_no_arguments_may_be_none(self):
        """Celery passes None for no arguments."""
        assert namer(nothing).name(None, None) == namer(nothing).name((), {})

    @given(VALUES, VALUES)
    def test_different_arguments_have_different_names(self, one, other):
        names = NAMES_OF_BILL
        equal = repr_of(one) == repr_of(other)
        assert (name_of(names, one) == name_of(names, other)) is equal

    @given(
        st.lists(VALUES, min_size=1, max_size=3), st.dictionaries(st.sampled_from("xyz"), VALUES)
    )
    def test_client_and_worker_agree(self, args, kwargs):
        names = NAMES_OF_FETCH
        assert names.name(tuple(args), kwargs) == names.name(*on_worker(args, kwargs))

    def test_arguments_do_not_run_into_each_other(self):
        def body(a="", b=""):
            pass

        names = namer(body)
        assert name_of(names, 'x","b":"y') != name_of(names, "x", "y")
        assert name_of(names, "x", "") != name_of(names, "", "x")

    def test_variable_arguments_make_the_name_too(self):
        names = namer(fetch)
        calls = [
            name_of(names, "u"),
            name_of(names, "u", "a"),
            name_of(names, "u", "a", "b"),
            name_of(names, "u", etag=1),
            name_of(names, "u", etag=None),
        ]
        assert len(set(calls)) == len(calls)

    def test_a_task_without_parameters_is_its_own_name(self):
        assert name_of(namer(nothing)) == "shop.task"

    def test_two_tasks_have_two_names(self):
        assert name_of(namer(bill), 1) != name_of(namer(bill, name="shop.other"), 1)

    @pytest.mark.parametrize("wrong", [((), {}), ((1, 2), {}), ((1,), {"nope": "secret-value"})])
    @pytest.mark.parametrize("options", [{}, {"unique_on": ()}, {"lock_key": "fixed"}])
    def test_arguments_that_do_not_fit_have_no_name(self, wrong, options):
        args, kwargs = wrong
        message = refusal(namer(bill, **options), *args, **kwargs)
        assert message.startswith("Task 'shop.task': ")
        assert "secret-value" not in message

    def test_a_refused_argument_is_named_with_its_path(self):
        message = refusal(namer(bill), {"items": ["secret-value", {"secret-value"}]})
        assert message == (
            "Task 'shop.task': argument `invoice_id.items[1]` is of type set and cannot be part "
            "of a lock name; say with unique_on=(...) which arguments make the key, "
            "or give a lock_key"
        )


class TestUniqueOn:
    def test_only_the_chosen_arguments_count(self):
        names = namer(fetch, unique_on=("url",))
        assert name_of(names, "u") == name_of(names, "u", object(), depth=3)
        assert name_of(names, "u") != name_of(names, "v")

    def test_the_order_and_kind_of_the_choice_do_not_matter(self):
        choices = [("url", "depth"), ["depth", "url"], {"url", "depth"}, ("url", "depth", "url")]
        assert len({name_of(namer(fetch, unique_on=choice), "u") for choice in choices}) == 1

    def test_no_argument_chosen_is_the_task_name(self):
        assert name_of(namer(bill, unique_on=()), 1) == "shop.task"

    def test_a_keyword_that_was_not_passed_is_not_none(self):
        names = namer(fetch, unique_on=("etag",))
        absent, none = name_of(names, "u"), name_of(names, "u", etag=None)
        assert absent.startswith("shop.task:")
        assert absent != none

    def test_a_parameter_wins_over_a_keyword_of_its_name(self):
        """``**kwargs`` may hold the name of a positional-only parameter."""

        def body(a, /, **rest):
            pass

        names = namer(body, unique_on=("a",))
        assert name_of(names, 1, a=2) == name_of(names, 1, a=3)

    def test_one_str_is_refused(self):
        """A forgotten comma is found at registration."""
        message = misfit(bill, unique_on="invoice_id")
        assert "unique_on='invoice_id' is one str; write ('invoice_id',)" in message

    @pytest.mark.parametrize("choice", [5, (5,), ("invoice_id", None)])
    def test_what_is_no_name_is_refused(self, choice):
        expected = f"Task 'shop.task': unique_on={choice!r} must be a tuple of argument names"
        assert misfit(bill, unique_on=choice) == expected

    def test_an_unknown_name_is_refused_with_the_nearest(self):
        assert misfit(bill, unique_on=("invoce_id",)) == (
            "Task 'shop.task': unique_on=('invoce_id',) names 'invoce_id', which is no "
            "parameter; did you mean 'invoice_id'? parameters: invoice_id, dry_run"
        )

    def test_a_task_without_parameters_has_none_to_choose(self):
        assert misfit(nothing, unique_on=("a",)).endswith("is no parameter; parameters: none")

    def test_it_does_not_go_with_a_lock_key(self):
        """A lock key is the whole name; both together are a mistake, even ``()``."""
        message = misfit(bill, lock_key="x", unique_on=())
        assert "lock_key='x' is the whole name, so unique_on=() has nothing to choose" in message


class TestTemplate:
    @pytest.mark.parametrize(
        ("template", "args", "name"),
        [
            ("report:{a}", (7,), "report:7"),
            ("{a}-{b}", ("x",), "x-2"),
            ("{a!s}", (7,), "7"),
            ("{a:05d}", (7,), "00007"),
            ("{a:%Y%m}", (date(2024, 1, 2),), "202401"),
            ("{{{a}}}", (7,), "{7}"),
            ("nightly", (7,), "nightly"),
            ("{a}", (None,), "None"),
            ("{a}", (True,), "True"),
            ("{a}", (1.5,), "1.5"),
            ("{a}", (Decimal("1.50"),), "1.50"),
            ("{a}", (UUID(int=1),), str(UUID(int=1))),
            ("{a}", (Colour.RED,), "red"),
            ("{a:>5}", (Colour.RED,), "  red"),
            ("{a[0]}", ([7],), "7"),
            ("{a[0]}", ((7,),), "7"),
            ("{a[0]}", ({"0": 7},), "7"),
            ("{a[0]}", ({0: 7},), "7"),
            ("{a[x y]}", ({"x y": 7},), "7"),
            ("{a[_id]}", ({"_id": 7},), "7"),
            ("{a.items}", ({"items": 7},), "7"),
            ("{a.id}", (Order(7),), "7"),
            ("{a.id}", ({"id": 7},), "7"),
            ("{a[x][1].id}", ({"x": [0, Order(7)]},), "7"),
            ("é{a}", ("😀",), "é😀"),
            ("é{a}", ("\ud83d\ude00",), "é😀"),
        ],
    )
    def test_fields_are_filled_from_the_bound_arguments(self, template, args, name):
        def body(a, b=2):
            pass

        names = namer(body, lock_key=template)
        assert name_of(names, *args) == name

    @given(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.uuids()
        | st.decimals()
        | st.datetimes()
    )
    def test_client_and_worker_agree(self, value):
        names = TEMPLATE_OF_BILL
        args = ({1: [value]},)
        assert names.name(args, None) == names.name(*on_worker(args, {}))

    def test_variable_arguments_have_names_too(self):
        names = namer(fetch, lock_key="{paths[0]}:{headers[etag]}:{headers.etag}:{etag}")
        assert name_of(names, "u", "p", etag=7) == "p:7:7:7"

    def test_a_keyword_that_was_not_passed_is_refused(self):
        message = refusal(namer(fetch, lock_key="{etag}"), "u")
        assert message == (
            "Task 'shop.task': field {etag} of lock_key cannot be read (KeyError); "
            "is it in every call?"
        )

    @pytest.mark.parametrize(
        ("field", "value", "why"),
        [
            ("invoice_id.nope", Order(1), "cannot be read (AttributeError)"),
            ("invoice_id.nope", {"id": 1}, "cannot be read (KeyError)"),
            ("invoice_id[x].id", {"x": [1]}, "cannot be read (AttributeError)"),
            ("invoice_id.keys", {"id": 1}, "cannot be read (KeyError)"),
            ("invoice_id[3]", [1], "cannot be read (IndexError)"),
            ("invoice_id[x]", [1], "cannot be read (ValueError)"),
            ("invoice_id[x]", 5, "cannot be read (ValueError)"),
            ("invoice_id.broken", Order(1), "cannot be read (RuntimeError)"),
            ("invoice_id.total", Order(1), "is of type method; pick an attribute"),
            ("invoice_id.upper", "x", "is of type builtin_function_or_method; pick"),
            ("invoice_id", Order(1), "is of type Order; pick an attribute or item"),
            ("invoice_id", {"id": 1}, "is of type dict; pick an attribute or item"),
            ("invoice_id", [1], "is of type list; pick an attribute or item"),
            ("invoice_id", b"x", "is of type bytes; pick an attribute or item"),
        ],
    )
    def test_a_field_that_cannot_be_printed_is_named(self, field, value, why):
        message = refusal(namer(bill, lock_key=f"x:{{{field}}}"), value)
        assert message.startswith(f"Task 'shop.task': field {{{field}}} of lock_key {why}")
        assert "secret-value" not in message

    def test_a_spec_that_does_not_suit_the_value_is_refused(self):
        """A format spec meets the wrong type only at run time."""
        assert "field {invoice_id}" in refusal(namer(bill, lock_key="{invoice_id:d}"), "x")

    def test_so_many_names_are_refused(self):
        """Each is a round to all nodes; a tuple says so when the task is declared."""
        many = [f"n{number}" for number in range(11)]
        assert "lock_key gave 11 names; a call may have 10" in refusal(
            namer(bill, lock_key=lambda *_: many)
        )
        assert "lock_key has 11 templates, 10 at most" in misfit(bill, lock_key=many)
        assert len(name_of(namer(bill, lock_key=many[1:]), 7)) == 10

    def test_an_empty_name_is_refused(self):
        """All calls with an empty value would share one lock by accident."""
        expected = "Task 'shop.task': lock_key gave an empty lock name"
        assert refusal(namer(bill, lock_key="{invoice_id}"), "") == expected

    def test_a_name_that_is_no_text_is_refused(self):
        message = refusal(namer(bill, lock_key="{invoice_id}"), "\ud83d")
        assert message == "Task 'shop.task': lock_key gave a lock name with lone surrogates"

    def test_an_unknown_argument_is_refused_with_the_nearest(self):
        assert misfit(bill, lock_key="x:{invoce_id.a}") == (
            "Task 'shop.task': lock_key='x:{invoce_id.a}' names 'invoce_id', which is no "
            "parameter; did you mean 'invoice_id'? parameters: invoice_id, dry_run"
        )

    @pytest.mark.parametrize(
        ("template", "why"),
        [
            ("", "is empty"),
            ("{invoice_id", "expected '}' before end of string"),
            ("invoice_id}", "Single '}' encountered"),
            ("{}", "{} is positional; name an argument"),
            ("{0}", "{0} is positional; name an argument"),
            ("{0.id}", "{0.id} is positional; name an argument"),
            ("{invoice_id!r}", "!r differs between processes; drop it"),
            ("{invoice_id:{dry_run}}", "the format spec of {invoice_id} has a field of its own"),
            ("{invoice_id.}", "{invoice_id.} is no argument with .attribute and [item] access"),
            ("{invoice_id..a}", "{invoice_id..a} is no argument with"),
            ("{invoice_id[]}", "{invoice_id[]} is no argument with"),
            ("{invoice_id[0]a}", "{invoice_id[0]a} is no argument with"),
            ("{invoice_id.total()}", "{invoice_id.total()} is no argument with"),
            ("{invoice id}", "{invoice id} is no argument with"),
            ("{.a}", "{.a} is no argument with"),
            ("{_private}", "'_private' in {_private} is private"),
            ("{invoice_id.__class__}", "'__class__' in {invoice_id.__class__} is private"),
        ],
    )
    def test_what_is_no_template_is_refused_at_registration(self, template, why):
        message = misfit(bill, lock_key=template)
        assert message.startswith(f"Task 'shop.task': lock_key={template!r} is ")
        assert why in message

    @pytest.mark.parametrize(
        "between", [":", "-", " ", "::", ", ", "/", "{{", "=a", "a=", "→", "_"]
    )
    @given(one=pairs, other=pairs)
    def test_two_calls_with_other_texts_have_other_names(self, between, one, other):
        """A value that holds what stands after its field does not pass for two of others."""
        assume(one != other)
        names = namer(pair, lock_key="p:{a}" + between + "{b}.")
        assert name_of(names, *one) != name_of(names, *other)

    @pytest.mark.parametrize(
        ("template", "args", "name"),
        [
            ("{a}:{b}", ("x:y", "z"), "x%3Ay:z"),
            ("{a}:{b}", ("x", "y:z"), "x:y:z"),
            ("{a}:{b}", ("50%", "100%"), "50%25:100%"),
            ("{a}-{b}", (date(2026, 3, 31), 7), "2026%2D03%2D31-7"),
            ("{a}-{b}", ("2026-03-31", 7), "2026%2D03%2D31-7"),
            ("{a} → {b}", ("x →", "z"), "x%20→ → z"),
            ("{a}→{b}", ("x→", "z"), "x%E2%86%92→z"),
            ("{a}:", ("x:y", "z"), "x:y:"),
        ],
    )
    def test_what_ends_a_field_is_encoded_in_it(self, template, args, name):
        """As in a URL, and only where there is such a character, in a field before the last."""
        assert name_of(namer(pair, lock_key=template), *args) == name

    @pytest.mark.parametrize("template", ["{a}{b}", "{a}x{b}", "{a}1{b}", "{a}%{b}", "{a}:{b}{a}"])
    def test_fields_that_run_together_are_warned_of(self, template, caplog):
        namer(pair, lock_key=template)
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert "shop.task" in record.getMessage()
        assert repr(template) in record.getMessage()

    @pytest.mark.parametrize("template", ["{a}:{b}", "x{a}y", "{a}, and {b}1", "x", "{a}a-{b}"])
    def test_others_are_not(self, template, caplog):
        namer(pair, lock_key=template)
        assert caplog.records == []

    @pytest.mark.parametrize("spec", [".2f", "f", "%", ",", ">9"])
    @pytest.mark.parametrize(
        "value", ["1E+100000000", "-1E+999999", "1E-100000000", "0E-100000000", "1E+1001"]
    )
    def test_a_number_that_would_be_long_is_refused(self, spec, value):
        """A short message must not make a name of a hundred megabytes."""
        message = refusal(namer(bill, lock_key="{invoice_id:" + spec + "}"), Decimal(value))
        assert message.startswith("Task 'shop.task': field {invoice_id} of lock_key is too large")

    @pytest.mark.parametrize(
        ("spec", "value", "name"),
        [
            (".2f", "1.005", "1.00"),
            (".2f", "1E+3", "1000.00"),
            (".1f", "NaN", "NaN"),
            (".1f", "-Infinity", "-Infinity"),
            ("", "1E+100000000", "1E+100000000"),
        ],
    )
    def test_other_numbers_are_formatted(self, spec, value, name):
        found = name_of(namer(bill, lock_key="{invoice_id:" + spec + "}"), Decimal(value))
        assert found == name


class TestCallable:
    def test_it_gets_the_raw_arguments(self):
        seen = []

        def key(*call):
            seen.append(call)
            return "k"

        task = task_of(bill)
        names = LockName.of_task(task, lock_key=key)
        assert names.name([1], {"dry_run": True}) == "k"
        assert seen == [(task, (1,), {"dry_run": True})]

    def test_it_cannot_change_the_arguments(self):
        """It gets copies: the body must see what was sent."""
        kwargs = {"dry_run": True}
        namer(bill, lock_key=lambda task, args, kwargs: kwargs.popitem()[0]).name([1], kwargs)
        assert kwargs == {"dry_run": True}

    def test_one_that_celery_bound_to_the_task_gets_the_task_once(self):
        task = task_of(bill, lock_key=lambda task, args, kwargs: f"{task.name}/{args[0]}")
        assert inspect.ismethod(task.lock_key)
        assert LockName.of_task(task, lock_key=task.lock_key).name((7,), {}) == "shop.task/7"

    def test_an_enum_of_str_counts_as_its_value(self):
        name = name_of(namer(bill, lock_key=lambda task, args, kwargs: Colour.RED))
        assert (type(name), name) == (str, "red")

    @pytest.mark.parametrize("result", [None, 5, b"x", (), ("a", 5)])
    def test_anything_but_names_is_refused(self, result):
        message = refusal(namer(bill, lock_key=lambda task, args, kwargs: result))
        kind = type(result).__name__
        assert message == (
            f"Task 'shop.task': its lock_key returned {kind}, not str or a tuple of them"
        )

    def test_several_names_are_taken_as_they_come(self):
        """In their order; none of them twice, which would be one lock."""
        names = namer(bill, lock_key=lambda task, args, kwargs: ["b", Colour.RED])
        assert name_of(names) == ("b", "red")
        twice = namer(bill, lock_key=lambda task, args, kwargs: ["b", "b"])
        assert "the same name more than once" in refusal(twice)
        assert "empty lock name" in refusal(namer(bill, lock_key=lambda *_: ("a", "")))

    def test_an_empty_name_is_refused(self):
        assert "empty lock name" in refusal(namer(bill, lock_key=lambda task, args, kwargs: ""))

    def test_its_failure_is_told_with_its_cause(self):
        """The error inside is the cause; its text, which may hold values, is not repeated."""
        names = namer(bill, lock_key=lambda task, args, kwargs: kwargs["secret-value"])
        with pytest.raises(
            LockKeyError, match=r"^Task 'shop.task': its lock_key raised KeyError$"
        ) as refused:
            names.name((), {})
        assert isinstance(refused.value.__cause__, KeyError)

    def test_one_that_takes_other_arguments_is_refused_at_registration(self):
        message = misfit(bill, lock_key=lambda args: "x")
        assert "must take (task, args, kwargs[, headers]): too many positional arguments" in message

    def test_one_that_takes_headers_gets_them(self):
        names = namer(bill, lock_key=lambda task, args, kwargs, headers: headers.pop("tenant"))
        headers = {"tenant": "a"}
        assert names.name((1,), {}, headers) == "a"
        assert headers == {"tenant": "a"}
        assert "its lock_key raised KeyError" in refusal(names, 1)
        assert namer(bill, lock_key=lambda *call: str(len(call))).name((1,), {}, headers) == "3"

    def test_one_without_a_signature_is_left_to_its_first_call(self):
        """Some callables written in C cannot be looked into."""
        names = namer(bill, lock_key=max)
        assert "its lock_key raised TypeError" in refusal(names, 1)

    @pytest.mark.parametrize("lock_key", [5, True])
    def test_anything_else_is_refused(self, lock_key):
        wrong = f"lock_key={lock_key!r} is neither a template, nor several, nor a callable"
        assert wrong in misfit(bill, lock_key=lock_key)

    @pytest.mark.parametrize("lock_key", [(), ("a", 5), (None,)])
    def test_several_are_templates(self, lock_key):
        wrong = f"lock_key={lock_key!r} must be templates, one at least"
        assert wrong in misfit(bill, lock_key=lock_key)
        with pytest.raises(ConfigurationError, match="no_such"):
            namer(bill, lock_key=("all", "x:{no_such}"))

    def test_several_templates_make_several_names(self):
        names = namer(bill, lock_key=("invoice:{invoice_id}", "all"))
        assert name_of(names, 7) == ("invoice:7", "all")


def logged(body):
    @functools.wraps(body)
    def wrapper(*args, **kwargs):
        return body(*args, **kwargs)

    return wrapper


class TestKindsOfTask:
    @pytest.mark.parametrize("autoretry", [{}, {"autoretry_for": (ValueError,)}])
    @pytest.mark.parametrize("decorate", [lambda body: body, logged])
    def test_self_is_no_argument(self, autoretry, decorate):
        def bound(self, a, b=2):
            pass

        def free(a, b=2):
            pass

        names = namer(decorate(bound), bind=True, **autoretry)
        assert name_of(names, 1) == name_of(namer(decorate(free), **autoretry), a=1, b=2)

    def test_a_class_based_task_has_a_name(self):
        app = Celery("t", set_as_current=False)

        class Bill(app.Task):
            name = "shop.task"

            def run(self, invoice_id, *, dry_run=False):
                pass

        task = app.register_task(Bill())
        assert LockName.of_task(task).name((7,), {}) == name_of(namer(bill), 7)


@before(5, 5, "pydantic=True is an attribute like any other")
def test_before_celery_validates_nobody_does():
    """The body gets what was sent, so that is what makes the name."""
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Order", id=(int, ...))

    def body(order):
        pass

    body.__annotations__ = {"order": model}
    names = namer(body, pydantic=True)
    assert name_of(names, {"id": "1"}) != name_of(names, {"id": 1})
    assert name_of(names, model(id=1)) == name_of(names, {"id": 1})


@since(5, 5, "pydantic=True")
class TestPydanticTasks:
    """Tasks with ``pydantic=True``: a client has a model, a worker its dict."""

    @pytest.fixture
    def pydantic(self):
        return pytest.importorskip("pydantic")

    @pytest.fixture
    def model(self, pydantic):
        return pydantic.create_model("Order", id=(int, ...), notes=(list[int], []))

    @pytest.fixture
    def ship(self, model):
        def body(order, fast=False):  # noqa: FBT002 - a user's task
            pass

        body.__annotations__ = {"order": model}
        return body

    @pytest.mark.parametrize("bind", [False, True])
    @pytest.mark.parametrize("autoretry", [{}, {"autoretry_for": (ValueError,)}])
    def test_a_model_and_all_that_becomes_it_have_one_name(self, model, bind, autoretry):
        def free(order, fast=False):  # noqa: FBT002 - a user's task
            pass

        def bound(self, order, fast=False):  # noqa: FBT002 - a user's task
            pass

        body = bound if bind else free
        body.__annotations__ = {"order": model}
        names = namer(body, pydantic=True, bind=bind, **autoretry)
        forms = [model(id=1), {"id": 1}, {"id": "1"}, {"id": 1, "notes": []}]
        assert len({name_of(names, form) for form in forms}) == 1
        assert name_of(names, {"id": 1}) != name_of(names, {"id": 2})

    @since(5, 7, "models among the arguments are dumped when a task is published")
    def test_the_name_is_that_of_what_celery_sends(self, model, ship):
        task = task_of(ship, pydantic=True)
        names = LockName.of_task(task)
        args, kwargs = task._dump_pydantic_arguments((model(id=1, notes=[2]),), {})
        assert type(args[0]) is dict
        assert names.name(*on_worker(args, kwargs)) == name_of(names, model(id=1, notes=[2]))

    @pytest.mark.parametrize("optional", ["Order | None", "typing.Optional[Order]", "Order"])
    def test_annotations_are_resolved_as_celery_does(self, model, ship, optional, monkeypatch):
        monkeypatch.setitem(ship.__globals__, "Order", model)
        monkeypatch.setitem(ship.__globals__, "typing", __import__("typing"))
        ship.__annotations__ = {"order": optional}
        names = namer(ship, pydantic=True)
        assert name_of(names, {"id": "1"}) == name_of(names, model(id=1))
        assert name_of(names, None) != name_of(names, {"id": 1})

    @pytest.mark.parametrize("annotation", [list[int], "Order | int | None", "NotKnown", int])
    def test_other_annotations_are_left_alone(self, model, ship, annotation, monkeypatch):
        monkeypatch.setitem(ship.__globals__, "Order", model)
        ship.__annotations__ = {"order": annotation}
        names = namer(ship, pydantic=True)
        assert name_of(names, {"id": "1"}) != name_of(names, {"id": 1})

    def test_a_task_without_pydantic_validates_nothing(self, ship):
        names = namer(ship)
        assert name_of(names, {"id": "1"}) != name_of(names, {"id": 1})

    def test_a_strict_task_can_be_named(self, ship):
        """Strictness is for the body to enforce; the name only needs the model."""
        names = namer(ship, pydantic=True, pydantic_strict=True)
        assert name_of(names, {"id": "1"}) == name_of(names, {"id": 1})

    def test_validators_get_the_context_that_celery_gives_them(self, pydantic):
        seen = []

        class Order(pydantic.BaseModel):
            id: int

            @pydantic.model_validator(mode="after")
            def look(self, info: pydantic.ValidationInfo):
                seen.append(dict(info.context))
                return self

        def body(order):
            pass

        body.__annotations__ = {"order": Order}
        task = task_of(body, pydantic=True, pydantic_context={"tenant": 7})
        LockName.of_task(task).name(({"id": 1},), {})
        assert seen == [{"tenant": 7, "celery_app": task.app, "celery_task_name": "shop.task"}]

    def test_a_refused_model_is_named_without_its_value(self, ship):
        message = refusal(namer(ship, pydantic=True), {"id": 1, "notes": [1, "secret-value"]})
        assert message == (
            "Task 'shop.task': argument `order.notes[1]` is refused by Order (int_parsing)"
        )

    def test_a_validator_that_fails_is_a_refusal(self, pydantic):
        class Order(pydantic.BaseModel):
            @pydantic.model_validator(mode="before")
            @classmethod
            def look(cls, data):
                raise RuntimeError("secret-value")

        def body(order):
            pass

        body.__annotations__ = {"order": Order}
        message = refusal(namer(body, pydantic=True), {})
        assert message == "Task 'shop.task': argument `order` is refused by Order (RuntimeError)"

    def test_only_what_makes_the_name_is_validated(self, ship):
        names = namer(ship, unique_on=("fast",), pydantic=True)
        assert name_of(names, {"nonsense": 1}) == name_of(names, {"id": 1})

    def test_a_template_reads_the_validated_model(self, model, ship):
        names = namer(ship, lock_key="{order.id:03d}", pydantic=True)
        assert {name_of(names, form) for form in (model(id=7), {"id": "7"})} == {"007"}
        assert "argument `order.id` is refused by Order (missing)" in refusal(names, {})


def repr_of(value):
    """Return what tells values apart by type and order of lists, not of dicts."""
    if isinstance(value, dict):
        return {key: repr_of(item) for key, item in value.items()}
    return [repr_of(item) for item in value] if isinstance(value, list) else repr(value)


NAMES_OF_BILL = namer(bill)
NAMES_OF_FETCH = namer(fetch)
TEMPLATE_OF_BILL = namer(bill, lock_key="x:{invoice_id[1][0]}")


class TestHeaders:
    def test_of_a_default_name_they_are_a_part(self):
        for names in (namer(pair), namer(pair, unique_on=()), namer(pair, unique_on=("a",))):
            found = {
                names.name((1, 2), {}, headers)
                for headers in (None, {}, {"t": "a"}, {"t": "b"}, {"u": "a"}, {"t": "a", "u": "a"})
            }
            assert len(found) == 5
            assert names.name((1, 2), {}) in found
        assert namer(pair, unique_on=()).name((1, 2), {}) == "shop.task"

    def test_of_a_template_they_are_none(self):
        assert namer(pair, lock_key="{a}").name((1, 2), {}, {"t": "a"}) == "1"

    def test_one_that_is_no_json_is_refused(self):
        with pytest.raises(LockKeyError, match=r"header `\.t` is of type object"):
            namer(pair).name((1, 2), {}, {"t": object()})
