// Command sse-gateway is a web gateway in another language: it turns a dualclaw engine's gRPC stream into the original
// SSE frames, byte for byte. It shows that nothing on the client side needs Python, and no more: it serves the one
// route POST /messages/stream.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	dualclaw "github.com/dualclaw/dualclaw-go"
)

func main() {
	engine := flag.String("engine", environment("DUALCLAW_ENGINE", "127.0.0.1:50051"), "the engine's address")
	listen := flag.String("listen", environment("DUALCLAW_WEB_LISTEN", "127.0.0.1:8090"), "where to listen; port 0 takes a free one")
	flag.Parse()
	if err := serve(*engine, *listen); err != nil {
		log.Fatal(err)
	}
}

func serve(engine, listen string) error {
	client, err := dualclaw.NewClient(engine)
	if err != nil {
		return err
	}
	defer client.Close()
	listener, err := net.Listen("tcp", listen)
	if err != nil {
		return err
	}
	stop, done := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer done()
	server := &http.Server{Handler: newGateway(client), ReadHeaderTimeout: 10 * time.Second}
	go func() {
		<-stop.Done()
		ending, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = server.Shutdown(ending)
	}()
	fmt.Printf("sse-gateway listening on http://%s\n", listener.Addr())
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func environment(name, otherwise string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return otherwise
}
