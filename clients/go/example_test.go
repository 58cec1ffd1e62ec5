package dualclaw_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"strings"
	"testing"

	dualclaw "github.com/dualclaw/dualclaw-go"
	v1 "github.com/dualclaw/dualclaw-go/gen/dualclaw/v1"
)

func ExampleClient_Ask() {
	client, err := dualclaw.NewClient("127.0.0.1:50051")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	stream, err := client.Ask(context.Background(), "What is 17 * 23?")
	if err != nil {
		log.Fatal(err)
	}
	defer stream.Close()
	for event, err := range stream.Events() {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(event.GetDelta().GetContent())
	}
}

func ExampleClient_Resume() {
	ctx := context.Background()
	var client *dualclaw.Client
	var stream *dualclaw.Stream

	var view dualclaw.RunView
	for event, err := range stream.Events() {
		if err != nil {
			log.Fatal(err)
		}
		view.Apply(event)
	}
	var decisions []*v1.Decision
	for _, item := range view.Interrupts {
		fmt.Println(item.GetPrompt(), item.GetToolName(), item.GetArgsJson())
		decisions = append(decisions, &v1.Decision{
			InterruptId: item.GetId(),
			Action:      v1.DecisionAction_DECISION_ACTION_APPROVE,
			ArgsHash:    item.GetArgsHash(), // approve what was shown, and nothing else
		})
	}
	stream, err := client.Resume(ctx, &v1.ResumeRequest{RunId: stream.RunID(), Decisions: decisions})
	_, _ = stream, err
}

func ExampleClient_Attach() {
	ctx := context.Background()
	var client *dualclaw.Client
	var runID string
	var lastSeq int32

	// In another process, or tomorrow: everything after what was seen, then what comes.
	stream, err := client.Attach(ctx, &v1.AttachRequest{RunId: runID, AfterSeq: lastSeq, Wait: true})
	_, _ = stream, err
}

func ExampleError() {
	var err error

	var refused *dualclaw.Error
	if errors.As(err, &refused) {
		switch refused.Reason {
		case "CONVERSATION_BUSY":
			fmt.Println("run", refused.Metadata["run_id"], "is still at work")
		case "OVERLOADED":
			fmt.Println("try again in", refused.RetryAfter)
		}
	}
}

// What the README shows is code of this file or of cmd/ask, so it compiles.
func TestReadmeShowsCodeThatCompiles(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	var source strings.Builder
	for _, path := range []string{"example_test.go", "cmd/ask/main.go"} {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		source.Write(text)
	}
	flat := func(text string) string { return strings.Join(strings.Fields(text), " ") }
	blocks := strings.Split(string(readme), "```go\n")[1:]
	if len(blocks) < 4 {
		t.Fatalf("only %d blocks of Go", len(blocks))
	}
	for _, block := range blocks {
		code, _, _ := strings.Cut(block, "```")
		if !strings.Contains(flat(source.String()), flat(code)) {
			t.Errorf("in neither file:\n%s", code)
		}
	}
}
