"""OpenAI Responses: requests, answers, and the model made of them."""
