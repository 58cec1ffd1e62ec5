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

func Example() {
	client, err := dualclaw.NewClient("127.0.0.1:50051")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	stream, err := client.Ask(context.Background(), "What is 17 * 23?")
	if err != nil {
		log.Fatal(err)
	}
	for event, err := range stream.Events() {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(event.GetDelta().GetContent())
	}
}

func Example_approval() {
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

func Example_later() {
	ctx := context.Background()
	var client *dualclaw.Client
	var runID string
	var lastSeq int32

	// In another process, or tomorrow: everything after what was seen, then what comes.
	stream, err := client.Attach(ctx, &v1.AttachRequest{RunId: runID, AfterSeq: lastSeq, Wait: true})
	_, _ = stream, err
}

func Example_errors() {
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

// What the README shows is code of this file, so it compiles.
func TestReadmeShowsCodeThatCompiles(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile("example_test.go")
	if err != nil {
		t.Fatal(err)
	}
	flat := func(text string) string { return strings.Join(strings.Fields(text), " ") }
	blocks := strings.Split(string(readme), "```go\n")[1:]
	if len(blocks) < 4 {
		t.Fatalf("only %d blocks of Go", len(blocks))
	}
	for _, block := range blocks {
		code, _, _ := strings.Cut(block, "```")
		if !strings.Contains(flat(string(source)), flat(code)) {
			t.Errorf("not in example_test.go:\n%s", code)
		}
	}
}
