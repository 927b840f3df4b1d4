"""A task of verifiers as an agent: rl.agent.function = "examples.verifiers_agent:play".

Bring a task with tools and rewards of your own in the place of `Answered`, and a harness in that of "null", a chat.
"""

import os

import verifiers.v1 as vf

from mcore_rl.rl.agents.run import Run


class Answered(vf.Task[vf.WireTaskData]):
    """A question and the text of its answer."""

    @vf.reward  # type: ignore[untyped-decorator]  # a package without types
    async def is_right(self, trace: vf.Trace) -> float:
        """Return 1 if the answer is the known one."""
        return float(trace.last_reply == self.data.answer)


async def play(run: Run) -> float:
    """Return the reward of the task."""
    os.environ["OPENAI_API_KEY"] = run.api_key
    client = vf.EvalClientConfig(base_url=run.base_url, api_key_var="OPENAI_API_KEY")
    config = vf.AgentConfig(model=run.model, client=client, harness={"id": "null"}, runtime=vf.SubprocessConfig())
    trace = await vf.Agent(config).run(Answered(vf.WireTaskData(prompt=run.problem.prompt, answer=run.problem.answer)))
    if not trace.ok:
        raise RuntimeError(f"the task failed: {trace.errors}")
    return float(trace.reward)
