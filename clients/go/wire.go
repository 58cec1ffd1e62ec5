package dualclaw

import (
	"strconv"
	"strings"

	"google.golang.org/protobuf/types/known/timestamppb"

	v1 "github.com/dualclaw/dualclaw-go/gen/dualclaw/v1"
)

// Names of the wire format; what is not here has no name on it.
var (
	kindNames = map[v1.StepKind]string{
		v1.StepKind_STEP_KIND_THINKING: "thinking",
		v1.StepKind_STEP_KIND_SKILL:    "skill",
		v1.StepKind_STEP_KIND_MCP:      "mcp",
		v1.StepKind_STEP_KIND_AGENT:    "agent",
		v1.StepKind_STEP_KIND_KB:       "kb",
		v1.StepKind_STEP_KIND_MEDIA:    "media",
	}
	phaseNames = map[v1.Phase]string{
		v1.Phase_PHASE_START: "start",
		v1.Phase_PHASE_OK:    "ok",
		v1.Phase_PHASE_FAIL:  "fail",
	}
	severityNames = map[v1.Severity]string{
		v1.Severity_SEVERITY_INFO:    "info",
		v1.Severity_SEVERITY_WARNING: "warning",
		v1.Severity_SEVERITY_ERROR:   "error",
	}
	interruptKindNames = map[v1.InterruptKind]string{
		v1.InterruptKind_INTERRUPT_KIND_APPROVAL: "approval",
		v1.InterruptKind_INTERRUPT_KIND_QUESTION: "question",
	}
	actionNames = map[v1.DecisionAction]string{
		v1.DecisionAction_DECISION_ACTION_APPROVE: "approve",
		v1.DecisionAction_DECISION_ACTION_REJECT:  "reject",
		v1.DecisionAction_DECISION_ACTION_EDIT:    "edit",
		v1.DecisionAction_DECISION_ACTION_SKIP:    "skip",
		v1.DecisionAction_DECISION_ACTION_RESPOND: "respond",
	}
)

// ToWire returns the wire form of an event: the JSON text of the contract, byte for byte what every other language
// writes. It reports false for an event that has none: its payload, or the kind of its step, is unset or newer than
// this package. Such an event is skipped.
func ToWire(event *v1.EngineEvent) (string, bool) {
	out, ok := appendWire(nil, event, allKeys)
	return string(out), ok
}

// Frame returns the SSE frame around a wire text.
func Frame(wire string) string {
	return "data: " + wire + "\n\n"
}

// OriginalFrame returns the frame of the original SSE route for an event by itself: thinned of its envelope, but with
// the trace_id on done and error. It reports false for what that route does not carry. A stream in which text may be
// taken back needs the rule of an OriginalEncoder beyond that.
func OriginalFrame(event *v1.EngineEvent) (string, bool) {
	keys := noKeys
	switch event.GetPayload().(type) {
	case *v1.EngineEvent_Interrupt, *v1.EngineEvent_Rewind:
		return "", false
	case *v1.EngineEvent_Done, *v1.EngineEvent_Error:
		keys = traceKey
	}
	out, ok := appendWire([]byte("data: "), event, keys)
	if !ok {
		return "", false
	}
	return string(out) + "\n\n", true
}

type envelopeKeys int

const (
	noKeys envelopeKeys = iota
	traceKey
	allKeys
)

func appendWire(out []byte, event *v1.EngineEvent, keys envelopeKeys) ([]byte, bool) {
	switch payload := event.GetPayload().(type) {
	case *v1.EngineEvent_Delta:
		out = appendText(append(out, `{"type": "delta", "content": `...), payload.Delta.GetContent())
	case *v1.EngineEvent_Reasoning:
		out = appendText(append(out, `{"type": "reasoning", "content": `...), payload.Reasoning.GetContent())
	case *v1.EngineEvent_Step:
		step := payload.Step
		if kindNames[step.GetStep().GetKind()] == "" {
			return out, false
		}
		out = appendStep(append(out, `{"type": "step", "step": `...), step.GetStep())
		if step.Index != nil && step.GetIndex() >= 0 {
			out = strconv.AppendInt(append(out, `, "index": `...), int64(step.GetIndex()), 10)
		}
	case *v1.EngineEvent_Done:
		out = appendDone(out, payload.Done)
	case *v1.EngineEvent_Error:
		out = appendText(append(out, `{"type": "error", "message": `...), payload.Error.GetMessage())
		out = appendDiagnosis(out, payload.Error.GetDiagnosis())
	case *v1.EngineEvent_Interrupt:
		out = append(out, `{"type": "interrupt", "items": [`...)
		for number, item := range payload.Interrupt.GetItems() {
			out = appendItem(separate(out, number), item)
		}
		out = append(out, ']')
	case *v1.EngineEvent_Rewind:
		rewind := payload.Rewind
		out = appendText(append(out, `{"type": "rewind", "content": `...), rewind.GetContent())
		out = appendIfAny(out, "reasoning", rewind.GetReasoning())
		out = appendIfAny(out, "reason", rewind.GetReason())
		if rewind.GetAttempt() > 0 {
			out = strconv.AppendInt(append(out, `, "attempt": `...), int64(rewind.GetAttempt()), 10)
		}
	default:
		return out, false
	}
	if keys == allKeys && event.GetSeq() > 0 {
		out = strconv.AppendInt(append(out, `, "seq": `...), int64(event.GetSeq()), 10)
	}
	if keys != noKeys {
		out = appendIfAny(out, "trace_id", event.GetTraceId())
	}
	if keys == allKeys {
		out = appendIfAny(out, "tenant_id", event.GetTenantId())
		out = appendIfAny(out, "claw", event.GetClaw())
		out = appendIfAny(out, "run_id", event.GetRunId())
	}
	return append(out, '}'), true
}

func appendStep(out []byte, step *v1.Step) []byte {
	kind := kindNames[step.GetKind()]
	out = appendText(append(out, `{"type": `...), kind)
	if kind == "thinking" {
		out = appendKey(out, "text", step.GetText())
	} else {
		if kind == "mcp" {
			out = appendKey(out, "server", step.GetServer())
		}
		out = appendKey(out, "name", step.GetName())
		out = append(append(out, `, "args": `...), CanonicalArgs(step.GetArgsJson())...)
		out = appendKey(out, "result", step.GetResult())
	}
	out = appendDiagnosis(out, step.GetDiagnosis())
	out = appendIfAny(out, "phase", phaseNames[step.GetPhase()])
	if node := step.GetNode(); node.GetId() != "" || node.GetType() != "" || node.GetLabel() != "" {
		out = appendText(append(out, `, "node": {"id": `...), node.GetId())
		out = appendKey(out, "type", node.GetType())
		out = append(appendKey(out, "label", node.GetLabel()), '}')
	}
	return append(out, '}')
}

func appendDone(out []byte, done *v1.Done) []byte {
	out = appendText(append(out, `{"type": "done", "message_id": `...), done.GetMessageId())
	out = appendKey(out, "conversation_id", done.GetConversationId())
	out = appendKey(out, "content", done.GetContent())
	out = append(out, `, "process_steps": [`...)
	written := 0
	for _, step := range done.GetProcessSteps() {
		if kindNames[step.GetKind()] != "" { // a newer kind is left out, the done itself never
			out = appendStep(separate(out, written), step)
			written++
		}
	}
	out = appendTexts(append(out, `], "used_skills": `...), done.GetUsedSkills())
	out = appendTexts(append(out, `, "used_mcp": `...), done.GetUsedMcp())
	return strconv.AppendBool(append(out, `, "generating": `...), done.GetGenerating())
}

func appendItem(out []byte, item *v1.InterruptItem) []byte {
	out = appendText(append(out, `{"id": `...), item.GetId())
	out = appendKey(out, "kind", interruptKindNames[item.GetKind()])
	out = appendIfAny(out, "tool_name", item.GetToolName())
	out = appendObject(out, "args", item.GetArgsJson())
	out = appendIfAny(out, "prompt", item.GetPrompt())
	var actions []string
	for _, action := range item.GetAllowedActions() {
		if name := actionNames[action]; name != "" {
			actions = append(actions, name)
		}
	}
	if len(actions) > 0 {
		out = appendTexts(append(out, `, "allowed_actions": `...), actions)
	}
	out = appendObject(out, "response_schema", item.GetResponseSchemaJson())
	if len(item.GetPath()) > 0 {
		out = appendTexts(append(out, `, "path": `...), item.GetPath())
	}
	out = appendIfAny(out, "args_hash", item.GetArgsHash())
	out = appendIfAny(out, "expire_time", timeText(item.GetExpireTime()))
	return append(out, '}')
}

func appendDiagnosis(out []byte, diagnosis *v1.Diagnosis) []byte {
	if !hasContent(diagnosis) {
		return out
	}
	out = appendText(append(out, `, "diagnosis": {"code": `...), diagnosis.GetCode())
	out = appendKey(out, "severity", severityNames[diagnosis.GetSeverity()])
	out = appendKey(out, "summary", diagnosis.GetSummary())
	out = appendKey(out, "detail", diagnosis.GetDetail())
	out = appendKey(out, "hint", diagnosis.GetHint())
	out = strconv.AppendBool(append(out, `, "retryable": `...), diagnosis.GetRetryable())
	return append(out, '}')
}

func hasContent(d *v1.Diagnosis) bool {
	return d.GetCode() != "" || severityNames[d.GetSeverity()] != "" || d.GetSummary() != "" ||
		d.GetDetail() != "" || d.GetHint() != "" || d.GetRetryable()
}

func appendText(out []byte, text string) []byte {
	return appendQuoted(out, text)
}

func appendKey(out []byte, key, text string) []byte {
	out = append(append(append(out, `, "`...), key...), `": `...)
	return appendQuoted(out, text)
}

func appendIfAny(out []byte, key, text string) []byte {
	if text == "" {
		return out
	}
	return appendKey(out, key, text)
}

func appendObject(out []byte, key, json string) []byte {
	object := CanonicalArgs(json)
	if object == "{}" {
		return out
	}
	return append(append(append(append(out, `, "`...), key...), `": `...), object...)
}

func appendTexts(out []byte, texts []string) []byte {
	out = append(out, '[')
	for number, text := range texts {
		out = appendQuoted(separate(out, number), text)
	}
	return append(out, ']')
}

func separate(out []byte, number int) []byte {
	if number > 0 {
		out = append(out, ", "...)
	}
	return out
}

// timeText prints a time as RFC 3339 with as many groups of three digits as it needs; nothing when out of range.
func timeText(moment *timestamppb.Timestamp) string {
	if moment == nil || moment.CheckValid() != nil {
		return ""
	}
	text := moment.AsTime().UTC().Format("2006-01-02T15:04:05.000000000")
	for strings.HasSuffix(text, "000") && strings.Contains(text, ".") {
		text = strings.TrimSuffix(strings.TrimSuffix(text, "000"), ".")
	}
	return text + "Z"
}
