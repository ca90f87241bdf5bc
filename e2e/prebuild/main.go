// Command prebuild builds the servers that tests run, so that they need not: CI starts
// it beside what needs none of them, and tests that come too early wait for it.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"time"

	"golang.org/x/sys/unix"

	"aether/e2e/cluster/apiserver"
	"aether/e2e/etcdtest"
	"aether/e2e/tool"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	for _, t := range []tool.Tool{etcdtest.Tool, apiserver.Tool} {
		start := time.Now()
		path, err := t.Build(ctx)
		if err != nil {
			fmt.Fprintln(os.Stderr, "prebuild:", err)
			os.Exit(1)
		}
		fmt.Printf("prebuild: %s after %s\n", path, time.Since(start).Round(time.Second))
	}
}
