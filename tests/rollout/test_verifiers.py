"""Environments of the verifiers package, real ones, played by a scripted engine."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config.sections.data import DataConfig
from penstock.config.sections.rollout import EnvironmentConfig
from penstock.data_plane import fields
from penstock.errors import ConfigError, EngineError, EnvironmentFailure, EnvironmentTimeout, PromptTooLong
from penstock.rollout.engines.scripted import ScriptedEngine, ScriptedResponse
from penstock.rollout.environments import Split, Trajectory
from penstock.rollout.environments.factory import make_environment
from penstock.rollout.environments.turns.tool_calls import ParsedCall, parse_tool_calls
from penstock.rollout.sample_columns import group_columns
from tests.rollout.talking import CHAT, Says, Talker, tagging_tokenizer, tokenizer


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifiers finds tasksets as modules at the top."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "tasksets"))


def talker(says: Says, **settings: Any) -> Talker:
    return Talker(says, tokenizer(CHAT), **settings)


@asynccontextmanager
async def environment(name: str, seconds: float = 20, **args: Any) -> AsyncIterator[Any]:
    config = EnvironmentConfig(kind=f"verifiers:{name}", args=args, timeout_seconds=seconds)
    made: Any = make_environment(config, DataConfig(chat_template=True, eval_size=1), seed=0)
    try:
        yield made
    finally:
        await made.close()


def shown(talker: Talker, trajectory: Trajectory) -> list[tuple[bool, str]]:
    return [(s.generation is not None, talker.tokens.decode_raw(s.token_ids)) for s in trajectory.segments]


def words(text: str) -> str:
    return text.split("say ")[1].split("<eos>")[0]


async def test_single_turn_tasks_are_played_and_scored_by_their_own_rewards() -> None:
    async with environment("penstock-echo", taskset={"words": 3}) as made:
        assert [prompt.text for prompt in made.prompts(Split.EVAL)] == ["say w0"]
        train = made.prompts(Split.TRAIN)
        assert [prompt.text for prompt in train] == ["say w1", "say w2"]
        model = talker(words)
        trajectory = await made.run(train[0], model.handle())
        assert shown(model, trajectory) == [(False, "user: say w1<eos>\nassistant: "), (True, "w1<eos>")]
        assert (trajectory.reward, trajectory.response_text, trajectory.truncated) == (1.5, "w1", False)
        assert trajectory.components == {"repeats": 1.0, "speaks": 1.0}, "what verifiers calls them, without weights"
        assert (trajectory.metrics["turns"], trajectory.metrics["tool_calls"]) == (1.0, 0.0)
        wrong = await made.run(train[1], talker(lambda text: "no").handle())
        assert wrong.reward == 0.5


async def test_a_conversation_keeps_the_models_tokens_logprobs_and_versions() -> None:
    async with environment("penstock-guess") as made:
        model = talker(lambda text: str(2 + text.count("up")) + " ")
        trajectory = await made.run(made.prompts(Split.TRAIN)[1], model.handle())
    assert shown(model, trajectory) == [
        (False, "user: guess<eos>\nassistant: "),
        (True, "2 <eos>"),
        (False, "\nuser: up<eos>\nassistant: "),
        (True, "3 <eos>"),
        (False, "\nuser: up<eos>\nassistant: "),
        (True, "4 <eos>"),
    ]
    assert trajectory.reward == 1.0
    columns: Any = group_columns([trajectory])
    ids, mask = (columns[name].row(0).tolist() for name in (fields.INPUT_IDS, fields.TOKEN_MASK))
    for request in model.requests:
        assert tuple(ids[: len(request.prompt_ids)]) == request.prompt_ids
    assert sum(mask) == trajectory.length == 9
    versions = columns[fields.TOKEN_VERSIONS].row(0).tolist()
    logprobs = columns[fields.GENERATION_LOGPROBS].row(0).tolist()
    assert [(3, -1.0) if kept else (-1, 0.0) for kept in mask] == list(zip(versions, logprobs, strict=True))


@pytest.fixture
async def adding_server() -> AsyncIterator[str]:
    """A real MCP server with one tool, in this process."""
    import uvicorn
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("sum")

    @server.tool()
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    app = server.streamable_http_app(stateless_http=True)
    web = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
    # It would put back, at its end, handlers of a loop that is gone by then.
    web.capture_signals = nullcontext  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(web.serve(sockets=[listening]))
    while not web.started:  # noqa: ASYNC110 - it has no event to wait for
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{port}/mcp"
    web.should_exit = True
    await task


async def test_tools_are_called_and_their_results_are_not_trained_on(adding_server: str) -> None:
    call = '<tool_call>{"name": "sum_add", "arguments": {"a": 2, "b": 2}}</tool_call>'
    model = talker(lambda text: text.split("tool: ")[1].split("<eos>")[0] if "tool: " in text else call)
    async with environment("penstock-adding", taskset={"tools": {"url": adding_server}}) as made:
        trajectory = await made.run(made.prompts(Split.TRAIN)[0], model.handle(max_new_tokens=90))
    assert shown(model, trajectory) == [
        (False, "tools: sum_adduser: add 2 and 2<eos>\nassistant: "),
        (True, f"{call}<eos>"),
        (False, "\ntool: 4<eos>\nassistant: "),
        (True, "4<eos>"),
    ]
    assert trajectory.reward == 1.0
    assert (trajectory.metrics["turns"], trajectory.metrics["tool_calls"]) == (2.0, 1.0)


async def test_calls_in_tags_that_are_special_tokens_are_calls(adding_server: str) -> None:
    call = '<tool_call>{"name": "sum_add", "arguments": {"a": 2, "b": 2}}</tool_call>'
    tokens = tagging_tokenizer("<tool_call>", "</tool_call>", template=CHAT)
    model = Talker(lambda text: text.split("tool: ")[1].split("<eos>")[0] if "tool: " in text else call, tokens)
    async with environment("penstock-adding", taskset={"tools": {"url": adding_server}}) as made:
        assert (await made.run(made.prompts(Split.TRAIN)[0], model.handle(max_new_tokens=90))).reward == 1.0


async def test_many_samples_at_once_stay_apart() -> None:
    async with environment("penstock-echo", taskset={"words": 3}) as made:
        prompts = made.prompts(Split.TRAIN) * 4
        model = talker(words)
        runs = [made.run(prompt, model.handle(f"grp_g{i}")) for i, prompt in enumerate(prompts)]
        played = await asyncio.gather(*runs)
        assert [trajectory.response_text for trajectory in played] == ["w1", "w2"] * 4
        assert not made._client.samples


async def test_what_goes_wrong_is_told_as_what_it_is() -> None:
    async with environment("penstock-echo") as made:
        w1, _, w3 = made.prompts(Split.TRAIN)
        with pytest.raises(
            EnvironmentFailure, match=r"w3 has no reward.*penstock_echo.py, line 18, in repeats"
        ) as caught:
            await made.run(w3, talker(words).handle())
        assert caught.value.trace is not None
        assert "penstock_echo.py:18 in repeats" in caught.value.trace.cause
        assert 'raise RuntimeError("w3 has no reward")' in caught.value.trace.traceback
        assert caught.value.response == "w3"
        with pytest.raises(PromptTooLong):
            await made.run(w1, talker(words, max_model_len=10).handle())
        broken = talker(words)

        def gone(request: Any) -> ScriptedResponse:
            raise EngineError("the engine is gone")

        broken.engine = ScriptedEngine(gone)
        with pytest.raises(EngineError, match="the engine is gone"):
            await made.run(w1, broken.handle())
        assert (await made.run(w1, talker(words).handle())).reward == 1.5


async def test_a_slow_model_does_not_use_up_the_environments_time() -> None:
    slow = talker(words)
    answer = slow._answer

    def later(request: Any) -> ScriptedResponse:
        return replace(answer(request), seconds=0.6)

    slow.engine = ScriptedEngine(later)
    async with environment("penstock-echo", seconds=0.5) as made:
        assert (await made.run(made.prompts(Split.TRAIN)[0], slow.handle())).reward == 1.5


async def test_cancelling_a_sample_ends_its_request() -> None:
    slow = talker(words)
    slow.engine = ScriptedEngine(lambda request: ScriptedResponse(60.0))
    async with environment("penstock-echo") as made:
        task = asyncio.create_task(made.run(made.prompts(Split.TRAIN)[0], slow.handle()))
        while not slow.engine.stats().running:  # noqa: ASYNC110 - the engine is looked at, not told to signal
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert slow.engine.stats().running == 0
        assert (await made.run(made.prompts(Split.TRAIN)[0], talker(words).handle())).reward == 1.5


async def test_no_room_for_a_further_turn_ends_as_truncated_and_is_scored() -> None:
    async with environment("penstock-guess") as made:
        model = talker(lambda text: "1", max_model_len=40)
        trajectory = await made.run(made.prompts(Split.TRAIN)[0], model.handle())
    assert shown(model, trajectory) == [(False, "user: guess<eos>\nassistant: "), (True, "1<eos>")]
    assert (trajectory.reward, trajectory.truncated) == (0.0, True)


async def test_limits_of_verifiers_end_the_episode() -> None:
    async with environment("penstock-guess", player={"max_turns": 2}) as made:
        trajectory = await made.run(made.prompts(Split.TRAIN)[2], talker(lambda text: "1").handle())
    assert [s.generation is not None for s in trajectory.segments] == [False, True, False, True]


async def test_a_program_that_rewrites_the_conversation_is_refused() -> None:
    async with environment("penstock-forgetful") as made:
        with pytest.raises(EnvironmentFailure, match="rewrites earlier turns"):
            await made.run(made.prompts(Split.TRAIN)[0], talker(lambda text: "1").handle())


async def test_two_trainable_agents_are_refused() -> None:
    async with environment("penstock-duel") as made:
        with pytest.raises(EnvironmentFailure, match="2 trainable agents; Penstock trains one per sample"):
            await made.run(made.prompts(Split.TRAIN)[0], talker(lambda text: "1").handle())


async def test_a_reward_that_hangs_is_given_up() -> None:
    async with environment("penstock-echo", seconds=0.3, taskset={"words": 9}) as made:
        hanging = made.prompts(Split.TRAIN)[7]
        with pytest.raises(EnvironmentTimeout, match=r"timeout_seconds"):
            await made.run(hanging, talker(words).handle())


def problems(name: str, eval_size: int = 1, **args: Any) -> str:
    config = EnvironmentConfig(kind=f"verifiers:{name}", args=args)
    with pytest.raises(ConfigError) as caught:
        make_environment(config, DataConfig(chat_template=True, eval_size=eval_size), seed=0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "args", "start"),
    [
        ("no-such-tasks", {}, "rollout.environment.kind: taskset 'no-such-tasks' not found"),
        ("json", {}, "rollout.environment.kind: "),
        ("penstock-echo", {"taskset": {"wrds": 3}}, "rollout.environment.args.taskset.wrds: "),
        ("penstock-echo", {"agent": {"max_turns": "x"}}, "rollout.environment.args.agent.max_turns: "),
        (
            "penstock-echo",
            {"agent": {"sampling": {"top_p": 0.5}}},
            "rollout.environment.args.agent.sampling: is set by",
        ),
        ("penstock-echo", {"interception": {"type": "server"}}, "rollout.environment.args.interception: is set by"),
    ],
)
def test_wrong_settings_are_named(name: str, args: dict[str, Any], start: str) -> None:
    assert problems(name, **args).startswith(start)


def test_a_module_that_exits_and_settings_of_another_type_are_wrong_settings() -> None:
    assert "rollout.environment.kind: verifiers cannot load 'penstock-exits': SystemExit: 0" in problems(
        "penstock-exits"
    )
    assert "rollout.environment.args.taskset: expected a mapping" in problems("penstock-echo", taskset=3)


def test_held_out_tasks_must_leave_some() -> None:
    assert "data.eval_size: 50 held-out tasks leave none of the taskset's 4" in problems("penstock-echo", eval_size=50)


def test_an_endless_taskset_that_repeats_itself_is_named() -> None:
    config = EnvironmentConfig(kind="verifiers:penstock-endless")
    with pytest.raises(ConfigError, match=r"data\.eval_size: of 250 tasks .* only 0 differ .* repeats itself"):
        make_environment(config, DataConfig(chat_template=True, train_size=5, eval_size=3), seed=0)
    made = make_environment(config, DataConfig(chat_template=True, train_size=5, eval_size=1), seed=0)
    assert [prompt.text for prompt in made.prompts(Split.TRAIN)] == ["say w1", "say w2"] * 2 + ["say w1"]


async def test_servers_that_do_not_start_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.rollout.environments.verifiers import adapter as verifiers_adapter

    @asynccontextmanager
    async def never(self: Any) -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr(verifiers_adapter, "_START_SECONDS", 0.05)
    async with environment("penstock-echo") as made:
        monkeypatch.setattr(type(made._env), "serving", never)
        for _ in range(2):
            with pytest.raises(EnvironmentFailure, match=r"its servers did not start within 0\.05 s"):
                await asyncio.wait_for(made.run(made.prompts(Split.TRAIN)[0], talker(words).handle()), 5)


def test_without_the_package_the_command_to_install_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.split(".")[0] == "verifiers" or ".environments.verifiers." in name
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "verifiers", None)
    assert "pip install 'verifiers>=0.4,<0.5'" in problems("gsm8k")


HOSTILE = {
    "digits": "9" * 5000,
    "levels": "[" * 50_000,
    "closed levels": "[" * 400 + "]" * 400,
    "half a character": r'"\ud800"',
}
HOSTILE_CALLS = [
    *(f'<tool_call>{{"name": "sum_add", "arguments": {{"a": {value}}}}}</tool_call>' for value in HOSTILE.values()),
    r'<tool_call>{"name": "sum_\ud800"}</tool_call>',
]


@pytest.mark.parametrize("value", HOSTILE.values(), ids=list(HOSTILE))
async def test_arguments_that_no_tool_could_take_are_told_to_the_model(value: str) -> None:
    from penstock.rollout.environments.verifiers.harness import _tool_message

    call = {"id": "1", "function": {"name": "sum_add", "arguments": f'{{"a": {value}}}'}}
    said = await _tool_message(call, {"sum_add": ("sum", "add")}, {})
    assert said["content"].startswith("error: arguments are not JSON that can be passed on: ")
    said["content"].encode()


async def test_a_model_that_writes_such_calls_fails_no_episode(adding_server: str) -> None:
    quoted = r'<tool_call>{"name": "sum_add", "arguments": "{\"a\": \"\\ud800\"}"}</tool_call>'
    async with environment("penstock-adding", taskset={"tools": {"url": adding_server}}) as made:
        prompt = made.prompts(Split.TRAIN)[0]
        for text in (*HOSTILE_CALLS, quoted):
            model = talker(lambda chat, text=text: "0" if "tool: " in chat else text, max_model_len=200_000)
            trajectory = await made.run(prompt, model.handle(max_new_tokens=60_000))
            assert trajectory.reward == 0.0
            assert ("tool: error" in "".join(part for _, part in shown(model, trajectory))) is (text is quoted)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain", "plain", []),
        ('so <tool_call>{"name": "f"}</tool_call>', "so", [ParsedCall("f", "{}")]),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [ParsedCall("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [ParsedCall("f", "{}")]),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        *((text, text, []) for text in HOSTILE_CALLS),
    ],
)
def test_tool_calls_are_found_in_text(text: str, content: str, calls: list[ParsedCall]) -> None:
    assert parse_tool_calls(text) == (content, calls)
