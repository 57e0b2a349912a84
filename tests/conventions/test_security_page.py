"""Every statement of docs/security.md is listed with the test that fails if it is not true."""

import ast
from pathlib import Path

import pytest

from conventions.conftest import ROOT

CRAFTED = "engines/megatron/test_crafted_states.py"
PRIVATE = "engines/ray/test_private_folders.py"
NODES = "engines/ray/test_ray_on_nodes.py"
PORTS = "test_local_ray_ports_use_loopback_and_require_token"
SECRETS = "cli/test_cli_secrets.py"
STATEMENTS = [
    ("only descriptions of tensors are accepted", CRAFTED, "test_crafted_state_is_rejected_and_runs_no_code"),
    ("`common.pt` and entries that are not tensors", CRAFTED, "test_crafted_state_is_rejected_and_runs_no_code"),
    ("No message suggests a way around it", CRAFTED, "test_crafted_state_is_rejected_and_runs_no_code"),
    ("`model.path`", CRAFTED, "test_crafted_initial_checkpoint_is_rejected_and_runs_no_code"),
    ("Files outside of the folder are not read", CRAFTED, "test_state_rejects_chunk_path_outside_its_folder"),
    ("only with `--allow-pickle`", "convert/test_conversion.py", "test_pickles_are_read_only_with_the_option"),
    ("and then as data only", "convert/test_conversion.py", "test_pickle_with_code_is_not_executed"),
    ("(`auto_map`) is not run", "data/test_untrusted_model.py", "test_tokenizer_code_is_not_executed"),
    ("Jinja in a sandbox", "data/test_untrusted_model.py", "test_chat_template_is_rendered_in_a_sandbox"),
    ("in a [sandbox](sandbox.md)", "rewards/test_sandbox_attacks.py", "test_attack_program_is_isolated"),
    ("or not at all", "rewards/test_sandbox.py", "test_missing_isolation_raises_and_names_cause"),
    ("other users' folders in `/tmp`", PRIVATE, "test_sweep_ignores_folders_of_other_user"),
    ("and shared memory | never touched", PRIVATE, "test_segment_removal_ignores_other_user"),
    (
        "from a folder that only you can write (0700), otherwise from your home",
        "engines/vllm/test_environment.py",
        "test_insecure_cache_folder_is_not_used",
    ),
    ("everything except NCCL is on 127.0.0.1", "engines/ray/test_ray_processes.py", PORTS),
    ("the run's token: made at each start", "engines/ray/test_ray_processes.py", PORTS),
    ("Ray's own ports, except the autoscaler's metrics, require", NODES, "test_ray_rejects_client_without_token"),
    ("made at each start and is stored, 0600", NODES, "test_ray_token_is_only_in_one_private_file"),
    ("It is in no command line, variable", NODES, "test_ray_token_is_only_in_one_private_file"),
    ("no dashboard and no port for Ray's client", NODES, "test_ray_opens_no_unused_ports"),
    ("in a folder that only you can enter", PRIVATE, "test_private_folder_is_unreadable_and_token_is_random"),
    ("the stores in which ranks", "weights/test_loopback.py", "test_store_listens_only_on_its_address"),
    (
        "and engines meet",
        "weights/test_loopback.py",
        "test_tensor_ranks_of_engine_listen_only_on_loopback",
    ),
    (
        "a value with a password or token in a URI is rejected",
        SECRETS,
        "test_password_in_any_recipe_source_is_refused_without_repeating",
    ),
    (
        "looked up when MLflow is opened",
        "tracking/test_secret_uris.py",
        "test_uri_variable_is_resolved_only_when_mlflow_is_opened",
    ),
    (
        "the variable that `reward.token_env` names",
        "rewards/test_http_reward.py",
        "test_bearer_token_is_read_from_environment",
    ),
    ("contain only its name", SECRETS, "test_variable_reference_is_written_by_name"),
    ("Messages, logs and tracebacks omit", SECRETS, "test_without_secrets_removes_only_secrets"),
    ("in files that only you can read", SECRETS, "test_saved_traceback_is_private_and_has_no_secret"),
    (
        "Only training and `validate --loss` import the file",
        "cli/test_cli_loss_trial.py",
        "test_only_the_trial_imports_the_file_of_a_loss",
    ),
    ("quoted for the shell", "conventions/test_hints.py", "test_hint_commands_quote_inserted_values"),
]


@pytest.mark.parametrize(("says", "file", "test"), STATEMENTS)
def test_every_security_statement_has_a_test(says: str, file: str, test: str) -> None:
    page = " ".join((ROOT / "docs" / "security.md").read_text("utf-8").split())
    assert says in page
    tree = ast.parse((ROOT / "tests" / Path(file)).read_text("utf-8"))
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
