// Command tiers runs the tests of this module in tiers, and says which and how far.
//
//   - Every package is in exactly one tier; none is left out.
//   - The servers that tests run (etcd, kube-apiserver) are built beside the pure tier, and no later tier begins before
//     they are there. Where that fails, each test that needs one says why.
//   - A failed test's output is shown when the test ends, a summary with the slowest packages at the end.
//   - With -full the race detector is on in every tier, and testseed.Full says so to the tests.
//
// It ends with 1 if anything has failed. It knows nothing of what the tests check.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"aether/e2e/testseed"
)

const module = "aether"

func main() {
	full := flag.Bool("full", false, "everything at full strength, with the race detector")
	limit := flag.Duration("timeout", 40*time.Minute, "the longest that a package's tests may take")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	r := &report{out: os.Stdout, last: time.Now()}
	if err := run(ctx, r, *full, *limit); err != nil {
		fmt.Fprintln(os.Stderr, "tiers:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, r *report, full bool, limit time.Duration) error {
	list, err := exec.CommandContext(ctx, "go", "list", "./...").Output()
	if err != nil {
		return fmt.Errorf("go list: %w", err)
	}
	var packages []string
	for _, p := range strings.Fields(string(list)) {
		packages = append(packages, strings.TrimPrefix(strings.TrimPrefix(p, module), "/"))
	}
	if full {
		if err := os.Setenv(testseed.FullVariable, "1"); err != nil {
			return err
		}
	}
	ticks := time.NewTicker(5 * time.Second)
	defer ticks.Stop()
	go func() {
		for range ticks.C {
			r.quiet(20 * time.Second)
		}
	}()

	servers := make(chan struct{})
	go func() {
		defer close(servers)
		start := time.Now()
		out, err := command(ctx, "nice", "-n", "10", "go", "run", "./e2e/prebuild").CombinedOutput()
		if err != nil {
			r.say("servers: FAILED, each test that needs one will say so: %v\n%s", err, out)
			return
		}
		r.say("servers: etcd and kube-apiserver are there after %.0f s", time.Since(start).Seconds())
	}()
	tiers := plan(packages, full)
	var errs []error
	for i, t := range tiers {
		if i == 1 {
			waitSaying(r, servers)
		}
		errs = append(errs, t.run(ctx, r, fmt.Sprintf("tier %d/%d %s", i+1, len(tiers), t.name), limit))
	}
	<-servers
	r.summary()
	return errors.Join(errs...)
}

// waitSaying waits for the servers, and says so while it lasts.
func waitSaying(r *report, servers <-chan struct{}) {
	start := time.Now()
	for {
		select {
		case <-servers:
			return
		case <-time.After(20 * time.Second):
			r.say("servers: etcd and kube-apiserver are being built, once for all runs (waited %.0f s)", time.Since(start).Seconds())
		}
	}
}

// run runs the tests of a tier.
func (t tier) run(ctx context.Context, r *report, title string, limit time.Duration) error {
	args := []string{"test", "-json", "-count=1", "-timeout", limit.String()}
	how := "without the race detector"
	if t.race {
		args, how = append(args, "-race"), "with the race detector"
	}
	for _, p := range t.paths {
		args = append(args, strings.TrimSuffix("./"+p, "/"))
	}
	r.begin(title, len(t.paths))
	r.say("%s: %d packages, %s", title, len(t.paths), how)
	start := time.Now()
	c := command(ctx, "go", args...)
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err != nil {
		return err
	}
	if err := c.Start(); err != nil {
		return err
	}
	rerr := r.read(out)
	err = c.Wait()
	r.say("%s: after %.0f s", title, time.Since(start).Seconds())
	if err := errors.Join(rerr, err); err != nil {
		return fmt.Errorf("%s: %w", title, err)
	}
	return nil
}

// command is a command that is interrupted, not killed, when ctx ends: tests take their namespaces down.
func command(ctx context.Context, name string, args ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, name, args...)
	c.Cancel = func() error { return c.Process.Signal(os.Interrupt) }
	return c
}
