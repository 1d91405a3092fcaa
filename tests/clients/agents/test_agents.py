"""Agent libraries: each answers by text, as a stream, and with a call that it carries out itself."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

MODEL = "penstock-demo"
QUESTION = "What does os.path.join do?"


def weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: A city's name.
    """
    return f"sunny in {city}"


@pytest.fixture
def url(server_url: str) -> str:
    return f"{server_url}/v1"


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents_carries_out_a_forced_call(url: str, api: str) -> None:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url, api_key="none")
    kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
    settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=400, temperature=0)
    agent: Any = agents.Agent(
        name="helper",
        instructions="Be brief.",
        model=kind(MODEL, client),
        tools=[agents.function_tool(weather)],
        model_settings=settings,
        tool_use_behavior="stop_on_first_tool",
    )

    async def called_and_streamed() -> tuple[str, str]:
        called = (await agents.Runner.run(agent, QUESTION)).final_output
        plain = agent.clone(tools=[], model_settings=agents.ModelSettings(temperature=0))
        result = agents.Runner.run_streamed(plain, QUESTION)
        deltas = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        assert "".join(deltas) == result.final_output
        return called, "".join(deltas)

    called, text = asyncio.run(called_and_streamed())
    assert called.startswith("sunny in ")
    assert text


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_pydantic_ai_gets_a_typed_output(url: str, api: str) -> None:
    import pydantic
    import pydantic_ai
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class City(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=20)
        size: int = pydantic.Field(ge=0, le=99)

    kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    model = kind(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))
    settings = {"max_tokens": 300, "temperature": 0.0}
    typed = pydantic_ai.Agent(model, output_type=City, model_settings=settings)
    assert isinstance(typed.run_sync(QUESTION).output, City)
    plain = pydantic_ai.Agent(model, model_settings={"max_tokens": 20, "temperature": 0.0})
    with plain.run_stream_sync(QUESTION) as stream:
        pieces = list(stream.stream_text(delta=True))
    assert "".join(pieces)


def test_langgraph_runs_a_model_and_its_tools(url: str) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode

    tools = [tool(weather)]
    chat = ChatOpenAI(model=MODEL, base_url=url, api_key="none", temperature=0, max_tokens=200)
    caller = chat.bind_tools(tools, tool_choice="required", parallel_tool_calls=False)
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [caller.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_edge("model", "tools")
    messages = graph.compile().invoke({"messages": [HumanMessage(QUESTION)]})["messages"]
    assert messages[-1].content.startswith("sunny in ")


def test_langchain_speaks_ollamas_api(url: str) -> None:
    import pydantic
    from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM

    class City(pydantic.BaseModel):
        size: int = pydantic.Field(ge=0, le=99)

    host = url.removesuffix("/v1")
    chat = ChatOllama(model=MODEL, base_url=host, temperature=0, num_predict=20, validate_model_on_init=True)
    whole = chat.invoke(QUESTION)
    assert whole.content
    assert whole.usage_metadata["output_tokens"] == 20
    assert "".join(piece.content for piece in chat.stream(QUESTION)) == whole.content
    form = ChatOllama(model=MODEL, base_url=host, temperature=0, num_predict=200).with_structured_output(City)
    assert isinstance(form.invoke(QUESTION), City)
    assert OllamaLLM(model=MODEL, base_url=host, temperature=0, num_predict=20).invoke(QUESTION)
    (vector,) = OllamaEmbeddings(model=f"{MODEL}-embed", base_url=host).embed_documents([QUESTION])
    assert len(vector) > 1


def test_dspy_answers_by_text_and_by_a_schema(url: str) -> None:
    import dspy

    lm = dspy.LM(f"openai/{MODEL}", api_base=url, api_key="none", cache=False, temperature=0.0, max_tokens=40)
    (text,) = lm(QUESTION)
    assert text
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    (answer,) = lm(QUESTION, response_format=form)
    assert json.loads(answer)["ok"] in (True, False)


def test_smolagents_model_answers_streams_and_calls(url: str) -> None:
    from smolagents import OpenAIModel, tool

    model = OpenAIModel(MODEL, api_base=url, api_key="none", temperature=0, max_tokens=200)
    messages = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    whole = model.generate(messages, max_tokens=20).content
    assert whole
    assert "".join(piece.content or "" for piece in model.generate_stream(messages, max_tokens=20)) == whole
    (call,) = model.generate(messages, tools_to_call_from=[tool(weather)]).tool_calls[:1]
    assert call.function.name == "weather"


def test_autogen_client_calls_and_its_agent_answers(url: str) -> None:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.models import UserMessage
    from autogen_core.tools import FunctionTool
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info = {
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "structured_output": True,
        "family": "unknown",
    }
    options = {"model": MODEL, "base_url": url, "api_key": "none", "model_info": info, "temperature": 0}

    async def ask() -> tuple[Any, Any]:
        client = OpenAIChatCompletionClient(**options, max_tokens=200)
        tools = [FunctionTool(weather, "Tells the weather.", strict=True)]
        called = await client.create(
            [UserMessage(content=QUESTION, source="user")], tools=tools, tool_choice="required"
        )
        agent = AssistantAgent("helper", OpenAIChatCompletionClient(**options, max_tokens=20))
        return called.content, (await agent.run(task=QUESTION)).messages[-1].content

    calls, text = asyncio.run(ask())
    assert [call.name for call in calls][:1] == ["weather"]
    assert text


def test_llm_answers_from_its_own_configuration(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    models = f"- model_id: penstock\n  model_name: {MODEL}\n  api_base: {url}\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    import llm

    model = llm.get_model("penstock")
    model.key = "none"
    whole = model.prompt(QUESTION, max_tokens=20, temperature=0, stream=False).text()
    assert whole
    assert "".join(model.prompt(QUESTION, max_tokens=20, temperature=0)) == whole
