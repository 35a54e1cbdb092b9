"""Tiny models of the rows of tools/check_models.py."""

import check_models
import pytest


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            made[name] = check_models.write_model(name, tmp_path_factory.mktemp(name) / "model")
        return made[name]

    return make
