"""Parts of a mapping keep its order, and take keys that it lacks."""

from __future__ import annotations

from mupax.mappings import drop_keys, drop_none, select_keys

VALUES = {"c": 1, "a": None, "b": 0}


def test_selected_keys_come_in_the_order_of_the_mapping():
    assert list(select_keys(VALUES, ("b", "c", "missing")).items()) == [("c", 1), ("b", 0)]


def test_dropped_keys_leave_all_others_in_order():
    assert list(drop_keys(VALUES, {"c", "missing"}).items()) == [("a", None), ("b", 0)]


def test_only_none_is_dropped_and_no_other_false_value():
    assert list(drop_none(VALUES).items()) == [("c", 1), ("b", 0)]
