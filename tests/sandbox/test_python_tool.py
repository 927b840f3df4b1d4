"""The tool that runs Python programs of the policy between its turns."""

import pickle

from mcore_rl.rl.environments.builtin import PythonTool


def test_a_program_of_a_turn_runs_in_the_sandbox_and_its_output_is_the_answer() -> None:
    def printed(program: str, seconds: float = 30.0) -> str:
        tool = pickle.loads(pickle.dumps(PythonTool(seconds=seconds, memory_mib=256, max_characters=300)))
        messages, reward, is_done = tool.step(f"I try ```python\n{program}\n```")
        assert (reward, is_done, messages[0]["role"]) == (0.0, False, "tool")
        return str(messages[0]["content"])

    assert printed("print(6 * 7)") == "42"
    assert printed("") == "(no output)"
    assert printed("x").endswith("NameError: name 'x' is not defined\n(ended with status 1)")
    assert "characters cut" in printed("print('x' * 999)")
    assert printed("import time; time.sleep(60)", seconds=1.0) == "(ended after 1 s)"
    assert PythonTool().step("42") == ([], 0.0, True)
