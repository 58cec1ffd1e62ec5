package dualclaw_test

import (
	"context"
	"errors"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	dualclaw "github.com/dualclaw/dualclaw-go"
	v1 "github.com/dualclaw/dualclaw-go/gen/dualclaw/v1"
)

// The live tests speak to the agent "conformance" of a real engine; tests/clients/languages of the repository starts
// it and sets DUALCLAW_ENGINE and DUALCLAW_CONTROL.
func live(t *testing.T) (*dualclaw.Client, context.Context) {
	t.Helper()
	engine := os.Getenv("DUALCLAW_ENGINE")
	if engine == "" {
		t.Skip("DUALCLAW_ENGINE is not set: nothing was tested against a real engine")
	}
	client, err := dualclaw.NewClient(engine)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	t.Cleanup(func() { cancel(); client.Close() })
	return client, ctx
}

func scenario(name string) *v1.RunRequest {
	return &v1.RunRequest{Agent: "conformance", Claw: "test", Message: dualclaw.UserMessage("conformance: " + name)}
}

func collect(t *testing.T, stream *dualclaw.Stream, err error) []*v1.EngineEvent {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	var events []*v1.EngineEvent
	for event, err := range stream.Events() {
		if err != nil {
			t.Fatal(err)
		}
		events = append(events, event)
	}
	return events
}

func fold(events []*v1.EngineEvent) *dualclaw.RunView {
	view := &dualclaw.RunView{}
	for _, event := range events {
		view.Apply(event)
	}
	return view
}

// checkRules holds a whole run against the rules of the contract that a client can see: R1 to R8.
func checkRules(t *testing.T, events []*v1.EngineEvent) {
	t.Helper()
	view, trace := &dualclaw.RunView{}, ""
	for number, event := range events {
		if int(event.GetSeq()) != number+1 {
			t.Errorf("R1: event %d has seq %d", number+1, event.GetSeq())
		}
		if view.Terminal != nil || trace == "" {
			trace = event.GetTraceId()
		}
		if len(trace) != 32 || event.GetTraceId() != trace || event.GetRunId() != events[0].GetRunId() || event.GetRunId() == "" {
			t.Errorf("R8: envelope of event %d: %v", number+1, event)
		}
		if number > 0 && events[number-1].GetInterrupt() != nil &&
			event.GetDone().GetStopReason() != v1.StopReason_STOP_REASON_INTERRUPTED {
			t.Errorf("R3: interrupt is followed by %v", event)
		}
		view.Apply(event)
		if done := event.GetDone(); done != nil {
			if done.GetContent() != view.Text() {
				t.Errorf("R5: done says %q, the deltas %q", done.GetContent(), view.Text())
			}
			steps := view.ProcessSteps()
			if len(steps) != len(done.GetProcessSteps()) {
				t.Fatalf("R6: done has %d steps, the events %d", len(done.GetProcessSteps()), len(steps))
			}
			for at, step := range steps {
				if !proto.Equal(step, done.GetProcessSteps()[at]) {
					t.Errorf("R6: step %d is %v in done, %v in the events", at, done.GetProcessSteps()[at], step)
				}
			}
			if strings.Join(done.GetUsedSkills(), ",") != strings.Join(view.UsedSkills(), ",") ||
				strings.Join(done.GetUsedMcp(), ",") != strings.Join(view.UsedMCP(), ",") {
				t.Errorf("R7: used %v %v, expected %v %v", done.GetUsedSkills(), done.GetUsedMcp(), view.UsedSkills(), view.UsedMCP())
			}
		}
	}
	if view.Terminal == nil {
		t.Error("R2: no terminal event")
	}
	if view.Interrupts == nil && len(view.OpenSteps()) > 0 {
		t.Errorf("R4: steps %v are open at the end", view.OpenSteps())
	}
}

func TestLiveScenarios(t *testing.T) {
	client, ctx := live(t)
	for name, text := range map[string]string{
		"text":   "Hello 你好 🙂",
		"tool":   "Two of three went well.",
		"args":   "Seen.",
		"rewind": "This is right.",
		"loop":   "That was enough.",
	} {
		t.Run(name, func(t *testing.T) {
			stream, err := client.Run(ctx, scenario(name))
			events := collect(t, stream, err)
			checkRules(t, events)
			if view := fold(events); view.Text() != text {
				t.Errorf("the text is %q, expected %q", view.Text(), text)
			}
		})
	}
}

func TestLiveArgumentsKeepEveryDigit(t *testing.T) {
	client, ctx := live(t)
	stream, err := client.Run(ctx, scenario("args"))
	for _, event := range collect(t, stream, err) {
		if step := event.GetStep().GetStep(); step != nil {
			wire, _ := dualclaw.ToWire(event)
			if !strings.Contains(wire, `"args": `+step.GetArgsJson()) || !strings.Contains(wire, "12345678901234567890") {
				t.Errorf("arguments were not copied: %s", wire)
			}
		}
	}
}

func TestLiveErrorIsAnEvent(t *testing.T) {
	client, ctx := live(t)
	stream, err := client.Run(ctx, scenario("error"))
	events := collect(t, stream, err)
	checkRules(t, events)
	if code := events[len(events)-1].GetError().GetDiagnosis().GetCode(); code != "model.bad_response" {
		t.Errorf("the run ended with %v", events[len(events)-1])
	}
}

func TestLiveRefusalIsTyped(t *testing.T) {
	client, ctx := live(t)
	request := scenario("text")
	request.Agent = "nobody"
	_, err := client.Run(ctx, request)
	if dualclaw.ReasonOf(err) != "UNKNOWN_AGENT" || !errors.Is(err, &dualclaw.Error{Reason: "UNKNOWN_AGENT"}) {
		t.Errorf("refused with %v", err)
	}
	if _, err := client.GetRun(ctx, "no-such-run"); dualclaw.ReasonOf(err) != "UNKNOWN_RUN" {
		t.Errorf("refused with %v", err)
	}
}

func TestLiveApproval(t *testing.T) {
	client, ctx := live(t)
	for action, text := range map[v1.DecisionAction]string{
		v1.DecisionAction_DECISION_ACTION_APPROVE: "Done: paid 5 to a.",
		v1.DecisionAction_DECISION_ACTION_REJECT:  "It was refused.",
	} {
		t.Run(action.String(), func(t *testing.T) {
			stream, err := client.Run(ctx, scenario("approval"))
			events := collect(t, stream, err)
			asked := fold(events).Interrupts
			if len(asked) != 1 || asked[0].GetToolName() != "pay" {
				t.Fatalf("asked %v", asked)
			}
			answer := &v1.ResumeRequest{RunId: stream.RunID(), Decisions: []*v1.Decision{
				{InterruptId: asked[0].GetId(), Action: action, ArgsHash: asked[0].GetArgsHash()},
			}}
			resumed, err := client.Resume(ctx, answer)
			events = append(events, collect(t, resumed, err)...)
			checkRules(t, events)
			if view := fold(events); view.Text() != text {
				t.Errorf("the answer is %q", view.Text())
			}
			if _, err := client.Resume(ctx, answer); dualclaw.ReasonOf(err) != "ALREADY_ANSWERED" {
				t.Errorf("answered twice: %v", err)
			}
		})
	}
}

func TestLiveQuestion(t *testing.T) {
	client, ctx := live(t)
	stream, err := client.Run(ctx, scenario("question"))
	events := collect(t, stream, err)
	asked := fold(events).Interrupts
	resumed, err := client.Resume(ctx, &v1.ResumeRequest{RunId: stream.RunID(), Decisions: []*v1.Decision{
		{InterruptId: asked[0].GetId(), Action: v1.DecisionAction_DECISION_ACTION_RESPOND, ResponseJson: `"blue"`},
	}})
	events = append(events, collect(t, resumed, err)...)
	checkRules(t, events)
	if view := fold(events); !strings.Contains(view.Text(), "blue") {
		t.Errorf("the answer is %q", view.Text())
	}
}

func TestLiveCancelKeepsTheText(t *testing.T) {
	client, ctx := live(t)
	stream, err := client.Run(ctx, scenario("slow"))
	if err != nil {
		t.Fatal(err)
	}
	var events []*v1.EngineEvent
	for event, err := range stream.Events() {
		if err != nil {
			t.Fatal(err)
		}
		events = append(events, event)
		if len(events) == 3 {
			if _, err := client.Cancel(ctx, stream.RunID(), "enough"); err != nil {
				t.Fatal(err)
			}
		}
	}
	checkRules(t, events)
	done := events[len(events)-1].GetDone()
	if done.GetStopReason() != v1.StopReason_STOP_REASON_CANCELLED || !strings.HasPrefix(done.GetContent(), "000 ") {
		t.Errorf("ended with %v", done)
	}
}

func TestLiveSameRequestGivesTheSameEvents(t *testing.T) {
	client, ctx := live(t)
	request := scenario("tool")
	request.RequestId = "go-" + time.Now().Format(time.RFC3339Nano)
	first, err := client.Run(ctx, request)
	once := collect(t, first, err)
	second, err := client.Run(ctx, request)
	twice := collect(t, second, err)
	if len(once) != len(twice) {
		t.Fatalf("R12: %d and %d events", len(once), len(twice))
	}
	for at := range once {
		if !proto.Equal(once[at], twice[at]) {
			t.Errorf("R12: event %d differs", at+1)
		}
	}
}

func TestLiveAttachGivesWhatFollows(t *testing.T) {
	client, ctx := live(t)
	stream, err := client.Run(ctx, scenario("tool"))
	events := collect(t, stream, err)
	for after := range events {
		attached, err := client.Attach(ctx, &v1.AttachRequest{RunId: stream.RunID(), AfterSeq: int32(after)})
		rest := collect(t, attached, err)
		if len(rest) != len(events)-after || !proto.Equal(rest[0], events[after]) {
			t.Errorf("R10: after %d came %d events", after, len(rest))
		}
	}
	_, err = client.Attach(ctx, &v1.AttachRequest{RunId: stream.RunID(), AfterSeq: 1000})
	if dualclaw.ReasonOf(err) != "AFTER_SEQ_OUT_OF_RANGE" {
		t.Errorf("refused with %v", err)
	}
}

func TestLiveKillLosesAndDoublesNothing(t *testing.T) {
	client, ctx := live(t)
	stream, err := client.Run(ctx, scenario("slow"))
	if err != nil {
		t.Fatal(err)
	}
	var events []*v1.EngineEvent
	killed := false
	for event, err := range stream.Events() {
		if err != nil {
			t.Fatal(err)
		}
		events = append(events, event)
		if len(events) == 5 && !killed {
			killed = true
			response, err := http.Post(os.Getenv("DUALCLAW_CONTROL")+"/kill", "", nil)
			if err != nil || response.StatusCode != http.StatusNoContent {
				t.Fatalf("the engine was not killed: %v %v", response, err)
			}
		}
	}
	checkRules(t, events)
	if view := fold(events); stream.Reconnects() == 0 || !strings.HasSuffix(view.Text(), "198 199 ") {
		t.Errorf("%d reconnects, text ends with %q", stream.Reconnects(), view.Text()[max(0, len(view.Text())-20):])
	}
}
