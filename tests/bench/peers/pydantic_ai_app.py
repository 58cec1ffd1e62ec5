"""pydantic-ai behind FastAPI, as its documentation shows streaming."""

import os

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

app = FastAPI()
MODEL = OpenAIChatModel("bench", provider=OpenAIProvider(base_url=os.environ["PROVIDER"], api_key="none"))
AGENT = Agent(MODEL, instructions="You are a helpful assistant. Use the tools.")


@AGENT.tool_plain
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"{city}: 21 degrees, sunny"


@AGENT.tool_plain
def population(city: str) -> str:
    """Tell how many people live in a city."""
    return f"{city}: 24 million"


class Question(BaseModel):
    content: str


@app.post("/stream")
async def stream(question: Question) -> StreamingResponse:
    async def frames():
        async with AGENT.run_stream(question.content) as result:
            async for text in result.stream_text(delta=True, debounce_by=None):
                yield f"data: {text}\n\n"

    return StreamingResponse(frames(), media_type="text/event-stream")
