package dualclaw

import (
	"maps"
	"slices"
	"strings"

	v1 "github.com/dualclaw/dualclaw-go/gen/dualclaw/v1"
)

// RunView is what a run has said so far. Give it every event in order; read it at any time. The zero value is ready; do not
// copy it once it was used. It is for one goroutine.
//
// The text of a segment is its last rewind plus later deltas; the first event after a terminal one starts it afresh.
// Steps live as long as the run, and the last event of an index replaces earlier ones whole.
type RunView struct {
	// LastSeq is the position of the newest event; 0 before the first.
	LastSeq int32
	// Terminal is the done or error that ended the segment; nil while it is open.
	Terminal *v1.EngineEvent
	// Interrupts are the open questions; nil again once the next segment has begun.
	Interrupts []*v1.InterruptItem
	// Steps are the steps of the run by index.
	Steps map[int32]*v1.Step

	text, reasoning strings.Builder
	nextIndex       int32
	order           []int32
}

// Apply takes in the next event. It reports false, and changes nothing, for a seq that was there already.
func (v *RunView) Apply(event *v1.EngineEvent) bool {
	if seq := event.GetSeq(); seq > 0 {
		if seq <= v.LastSeq {
			return false
		}
		v.LastSeq = seq
	}
	if v.Terminal != nil {
		v.Terminal, v.Interrupts = nil, nil
		v.text.Reset()
		v.reasoning.Reset()
	}
	switch payload := event.GetPayload().(type) {
	case *v1.EngineEvent_Delta:
		v.text.WriteString(payload.Delta.GetContent())
	case *v1.EngineEvent_Reasoning:
		v.reasoning.WriteString(payload.Reasoning.GetContent())
	case *v1.EngineEvent_Step:
		v.step(payload.Step)
	case *v1.EngineEvent_Rewind:
		v.text.Reset()
		v.text.WriteString(payload.Rewind.GetContent())
		v.reasoning.Reset()
		v.reasoning.WriteString(payload.Rewind.GetReasoning())
	case *v1.EngineEvent_Interrupt:
		v.Interrupts = payload.Interrupt.GetItems()
	case *v1.EngineEvent_Done, *v1.EngineEvent_Error:
		v.Terminal = event
	}
	return true
}

func (v *RunView) step(event *v1.StepEvent) {
	index := v.nextIndex // of an older producer, which says none
	if event.Index != nil {
		index = event.GetIndex()
	}
	if v.Steps == nil {
		v.Steps = map[int32]*v1.Step{}
	}
	if _, known := v.Steps[index]; !known {
		v.order = append(v.order, index)
	}
	v.Steps[index] = event.GetStep()
	v.nextIndex = max(v.nextIndex, index+1)
}

// Text is the answer of the segment so far.
func (v *RunView) Text() string { return v.text.String() }

// Reasoning is the reasoning of the segment so far.
func (v *RunView) Reasoning() string { return v.reasoning.String() }

// ProcessSteps are the steps of the run in index order, as done lists them.
func (v *RunView) ProcessSteps() []*v1.Step {
	steps := make([]*v1.Step, 0, len(v.Steps))
	for _, index := range slices.Sorted(maps.Keys(v.Steps)) {
		steps = append(steps, v.Steps[index])
	}
	return steps
}

// OpenSteps are the indexes of steps that have started and not ended, in order.
func (v *RunView) OpenSteps() []int32 {
	var open []int32
	for _, index := range slices.Sorted(maps.Keys(v.Steps)) {
		if v.Steps[index].GetPhase() == v1.Phase_PHASE_START {
			open = append(open, index)
		}
	}
	return open
}

// UsedSkills are the distinct names of skill steps that were carried out, in order of first start.
func (v *RunView) UsedSkills() []string { return v.used(v1.StepKind_STEP_KIND_SKILL) }

// UsedMCP are the distinct names of MCP steps that were carried out, in order of first start.
func (v *RunView) UsedMCP() []string { return v.used(v1.StepKind_STEP_KIND_MCP) }

// Codes of failed steps that never ran, so their tool does not count as used.
var notCarriedOut = map[string]bool{
	"tool.unknown":       true,
	"tool.bad_arguments": true,
	"tool.rejected":      true,
	"tool.skipped":       true,
	"permission.denied":  true,
}

func (v *RunView) used(kind v1.StepKind) []string {
	var names []string
	for _, index := range v.order {
		step := v.Steps[index]
		ran := step.GetPhase() == v1.Phase_PHASE_OK ||
			step.GetPhase() == v1.Phase_PHASE_FAIL && !notCarriedOut[step.GetDiagnosis().GetCode()]
		if step.GetKind() == kind && ran && !slices.Contains(names, step.GetName()) {
			names = append(names, step.GetName())
		}
	}
	return names
}
