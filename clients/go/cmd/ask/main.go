// Command ask asks a local engine one question and prints the answer as it comes. It is the first program of the README.
package main

import (
	"context"
	"fmt"
	"log"

	dualclaw "github.com/dualclaw/dualclaw-go"
)

func main() {
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
	fmt.Println()
}
