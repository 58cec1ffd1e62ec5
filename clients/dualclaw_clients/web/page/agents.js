// Which agent answers: those there are, the one that is chosen, what it is for.

import { make } from "./markdown.js";
import { call } from "./stream.js";

export class AgentChoice {
  // onTrouble(error) is told what went wrong, onModels(models) what the answers of the chosen one come from.
  constructor({ select, label, about, tools }, { onTrouble, onModels }) {
    Object.assign(this, { select, label, about, tools, onTrouble, onModels });
    this.agents = [];
    select.addEventListener("change", () => this.describe());
  }

  // Its name; "" where there is no choice, for then the engine's default answers.
  get chosen() {
    return this.agents.length > 1 ? this.select.value : "";
  }

  async read() {
    try {
      this.agents = (await call("GET", "/v1/agents?page_size=500")).agents;
    } catch (error) {
      this.onTrouble(error);
      return;
    }
    this.select.replaceChildren(...this.agents.map((agent) => {
      const option = make("option", "", agent.name);
      option.value = agent.name;
      return option;
    }));
    this.label.hidden = this.agents.length < 2;
    this.describe();
  }

  describe() {
    const agent = this.agents.find((one) => one.name === this.select.value) || this.agents[0];
    this.about.textContent = agent ? agent.description : "";
    this.onModels(agent ? agent.models : []);
    this.tools.replaceChildren(...(agent ? agent.tools : []).map((tool) => {
      const item = make("li", "", tool.name);
      item.title = tool.description;
      return item;
    }));
  }
}
