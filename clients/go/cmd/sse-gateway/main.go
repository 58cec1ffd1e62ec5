// Command sse-gateway is a web gateway in another language: it turns a dualclaw engine's gRPC stream into the original
// SSE frames, byte for byte. It shows that nothing on the client side needs Python, and no more: it serves the one
// route POST /messages/stream.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"os/signal"
	"syscall"

	dualclaw "github.com/dualclaw/dualclaw-go"
)

func main() {
	engine := flag.String("engine", environment("DUALCLAW_ENGINE", "127.0.0.1:50051"), "the engine's address")
	encrypted := flag.Bool("tls", environment("DUALCLAW_ENGINE_TLS", "false") == "true", "speak TLS to the engine")
	listen := flag.String("listen", environment("DUALCLAW_WEB_LISTEN", "127.0.0.1:8090"), "where to listen; port 0 takes a free one")
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("sse-gateway takes no arguments, only options: %q", flag.Args())
	}
	if err := run(*engine, *listen, *encrypted); err != nil {
		log.Fatal(err)
	}
}

func run(engine, listen string, encrypted bool) error {
	var opts []dualclaw.Option
	if encrypted {
		opts = append(opts, dualclaw.WithTLS(nil))
	}
	client, err := dualclaw.NewClient(engine, opts...)
	if err != nil {
		return err
	}
	defer client.Close()
	listener, err := net.Listen("tcp", listen)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	fmt.Printf("sse-gateway listening on http://%s\n", listener.Addr())
	return serve(ctx, client, listener, defaults)
}

func environment(name, otherwise string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return otherwise
}
