"""docs/tour.md names files that exist, by links that work, and functions that are in them."""

from __future__ import annotations

import re

from recorder import PACKAGE, TOUR, documented_files, documented_steps, tour_section

TITLES = ("A served request", "A training step")


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)]+)\)", TOUR.read_text(encoding="utf-8"))
    assert links
    for link in links:
        assert (TOUR.parent / link).exists(), link


def test_link_texts_are_the_linked_files():
    for text, link in re.findall(r"\[`([^`]+)`\]\(([^)]+)\)", TOUR.read_text(encoding="utf-8")):
        assert link in (f"../src/polyrec/{text}", f"../{text}")


def test_every_step_names_a_function_of_its_file():
    for title in TITLES:
        steps = documented_steps(title)
        assert len(steps) > 10
        assert len(steps) == len(re.findall(r"^\d+\. ", tour_section(title), re.MULTILINE)), (
            "every step has file and function"
        )
        for file, function in steps:
            source = (PACKAGE / file).read_text(encoding="utf-8")
            assert re.search(rf"def {function}\(", source), f"{file} has no {function}"
        assert {file for file, _ in steps} <= documented_files(title)


def test_it_stays_a_tour():
    assert len(TOUR.read_text(encoding="utf-8").splitlines()) <= 100
