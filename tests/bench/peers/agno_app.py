"""agno behind FastAPI, as its documentation shows streaming."""

import os

from agno.agent import Agent, RunEvent
from agno.models.openai.like import OpenAILike
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

app = FastAPI()


def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"{city}: 21 degrees, sunny"


def population(city: str) -> str:
    """Tell how many people live in a city."""
    return f"{city}: 24 million"


MODEL = OpenAILike(id="bench", base_url=os.environ["PROVIDER"], api_key="none")


class Question(BaseModel):
    content: str


@app.post("/stream")
async def stream(question: Question) -> StreamingResponse:
    agent = Agent(model=MODEL, tools=[weather, population], telemetry=False)

    async def frames():
        async for event in agent.arun(question.content, stream=True, stream_events=True):
            if event.event == RunEvent.run_content and event.content:
                yield f"data: {event.content}\n\n"

    return StreamingResponse(frames(), media_type="text/event-stream")
