"""openai-agents behind FastAPI, as its documentation shows streaming."""

import os

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel

app = FastAPI()
set_tracing_disabled(True)


@function_tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"{city}: 21 degrees, sunny"


@function_tool
def population(city: str) -> str:
    """Tell how many people live in a city."""
    return f"{city}: 24 million"


CLIENT = AsyncOpenAI(base_url=os.environ["PROVIDER"], api_key="none")
AGENT = Agent(
    name="bench",
    instructions="You are a helpful assistant. Use the tools.",
    model=OpenAIChatCompletionsModel(model="bench", openai_client=CLIENT),
    tools=[weather, population],
)


class Question(BaseModel):
    content: str


@app.post("/stream")
async def stream(question: Question) -> StreamingResponse:
    result = Runner.run_streamed(AGENT, question.content)

    async def frames():
        async for event in result.stream_events():
            if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
                yield f"data: {event.data.delta}\n\n"

    return StreamingResponse(frames(), media_type="text/event-stream")
