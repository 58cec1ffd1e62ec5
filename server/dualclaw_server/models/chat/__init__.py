"""OpenAI Chat Completions, which most vendors speak: requests, answers, dialects, and the model made of them."""
