"""A langgraph agent behind FastAPI, as its documentation shows streaming."""

import os

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from langchain.agents import create_agent
from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

app = FastAPI()


@tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"{city}: 21 degrees, sunny"


@tool
def population(city: str) -> str:
    """Tell how many people live in a city."""
    return f"{city}: 24 million"


MODEL = ChatOpenAI(model="bench", base_url=os.environ["PROVIDER"], api_key="none", streaming=True)
AGENT = create_agent(MODEL, tools=[weather, population], system_prompt="You are a helpful assistant. Use the tools.")


class Question(BaseModel):
    content: str


@app.post("/stream")
async def stream(question: Question) -> StreamingResponse:
    async def frames():
        messages = {"messages": [{"role": "user", "content": question.content}]}
        async for message, _ in AGENT.astream(messages, stream_mode="messages"):
            if isinstance(message, AIMessageChunk) and message.content:
                yield f"data: {message.content}\n\n"

    return StreamingResponse(frames(), media_type="text/event-stream")
