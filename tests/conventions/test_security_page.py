"""What docs/security.md says is tested: beside each statement, the test that fails where it is not so."""

import ast
from pathlib import Path

import pytest

from house.conftest import ROOT

CRAFTED = "engines/megatron/test_crafted_states.py"
PRIVATE = "engines/ray/test_private_folders.py"
NODES = "engines/ray/test_ray_on_nodes.py"
PORTS = "test_ports_of_a_ray_of_our_own_are_on_loopback_and_ask_for_its_token"
SECRETS = "cli/test_cli_secrets.py"
STATEMENTS = [
    ("only descriptions of tensors are accepted", CRAFTED, "test_a_crafted_state_is_refused_and_runs_nothing"),
    ("`common.pt` and entries that are not tensors", CRAFTED, "test_a_crafted_state_is_refused_and_runs_nothing"),
    ("No message suggests a way around it", CRAFTED, "test_a_crafted_state_is_refused_and_runs_nothing"),
    ("`model.path`", CRAFTED, "test_a_crafted_checkpoint_to_start_from_is_refused_and_runs_nothing"),
    ("Files outside of the folder are not read", CRAFTED, "test_chunks_are_read_from_the_folder_itself"),
    ("only with `--allow-pickle`", "convert/test_conversion.py", "test_pickles_are_read_only_when_asked"),
    ("and then as data only", "convert/test_conversion.py", "test_a_pickle_that_runs_code_does_not"),
    ("(`auto_map`) is not run", "data/test_untrusted_model.py", "test_code_of_a_tokenizer_is_not_run"),
    ("Jinja in a sandbox", "data/test_untrusted_model.py", "test_a_chat_template_is_rendered_in_a_sandbox"),
    ("in a [sandbox](sandbox.md)", "rewards/test_sandbox_attacks.py", "test_an_attack_is_contained"),
    ("or not at all", "rewards/test_sandbox.py", "test_where_a_machine_forbids_it_that_is_a_named_refusal"),
    ("other users' folders in `/tmp`", PRIVATE, "test_folders_of_another_user_are_left_alone"),
    ("and shared memory | never touched", PRIVATE, "test_shared_memory_of_another_user_is_left_alone"),
    (
        "from a folder that only you can write (0700), otherwise from your home",
        "engines/vllm/test_environment.py",
        "test_a_folder_of_caches_that_somebody_else_could_write_to_is_left_alone",
    ),
    ("everything except NCCL is on 127.0.0.1", "engines/ray/test_ray_processes.py", PORTS),
    ("the run's token: made at each start", "engines/ray/test_ray_processes.py", PORTS),
    ("Ray's own ports, except the autoscaler's metrics, require", NODES, "test_who_has_no_token_is_not_let_in"),
    ("made at each start and is stored, 0600", NODES, "test_the_token_is_in_one_private_file_and_nowhere_else"),
    ("It is in no command line, variable", NODES, "test_the_token_is_in_one_private_file_and_nowhere_else"),
    ("no dashboard and no port for Ray's client", NODES, "test_no_port_is_open_that_nobody_uses"),
    ("in a folder that only you can enter", PRIVATE, "test_nobody_else_can_look_into_it_or_guess_its_token"),
    ("the stores in which ranks", "engines/test_loopback.py", "test_a_store_listens_at_its_own_address_only"),
    (
        "and engines meet",
        "engines/test_loopback.py",
        "test_so_do_the_tensor_ranks_of_an_engine_which_vllm_brings_together",
    ),
    (
        "a value with a password or token in a URI is rejected",
        SECRETS,
        "test_a_password_on_any_way_into_a_recipe_is_refused_and_not_repeated",
    ),
    (
        "looked up when MLflow is opened",
        "tracking/test_secret_uris.py",
        "test_the_variable_is_looked_up_where_mlflow_is_opened",
    ),
    (
        "the variable that `reward.token_env` names",
        "rewards/test_http_reward.py",
        "test_a_token_comes_from_the_environment_and_stands_in_no_recipe",
    ),
    ("contain only its name", SECRETS, "test_a_variable_is_kept_by_name_wherever_a_recipe_is_written"),
    ("Messages, logs and tracebacks omit", SECRETS, "test_a_text_loses_its_secrets_and_nothing_else"),
    ("in files that only you can read", SECRETS, "test_the_traceback_that_is_kept_is_private_and_has_no_secret"),
    ("quoted for the shell", "house/test_house_hints.py", "test_words_of_a_command_are_quoted"),
]


@pytest.mark.parametrize(("says", "file", "test"), STATEMENTS)
def test_a_statement_has_its_test(says: str, file: str, test: str) -> None:
    page = " ".join((ROOT / "docs" / "security.md").read_text("utf-8").split())
    assert says in page
    tree = ast.parse((ROOT / "tests" / Path(file)).read_text("utf-8"))
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
