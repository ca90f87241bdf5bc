package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"aether/dataplane/admin"
	"aether/dataplane/plain"
)

const defaultAdmin = "127.0.0.1:9901"

// maxAnswer bounds what is read of an admin's answer.
const maxAnswer = 64 << 20

// ask gets a path of a node's admin.
func ask(ctx context.Context, address, path string) ([]byte, error) {
	return askBy(ctx, http.MethodGet, address, path)
}

// askTime is how long an admin may take to answer.
const askTime = 30 * time.Second

// askBy is ask with another method.
func askBy(ctx context.Context, method, address, path string) ([]byte, error) {
	return askWithin(ctx, askTime, method, address, path)
}

// askWithin is askBy with another time.
func askWithin(ctx context.Context, within time.Duration, method, address, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "http://"+address+path, nil)
	if err != nil {
		return nil, fmt.Errorf("--admin %q: %w", address, err)
	}
	req.Host = "localhost" // the admin answers no other name, lest a page in a browser reach it by one (package guard)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("no answer from the admin at %s; it listens in the node's own network namespace: %w", address, err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, maxAnswer+1))
	if err != nil {
		return nil, fmt.Errorf("admin at %s: %w", address, err)
	}
	if len(b) > maxAnswer {
		return nil, fmt.Errorf("admin at %s: its answer is larger than %d MiB", address, maxAnswer>>20)
	}
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("admin at %s: %s: %s", address, res.Status, strings.TrimSpace(string(b)))
	}
	return b, nil
}

func adminFlag(c *cobra.Command, address *string) {
	c.Flags().StringVar(address, "admin", defaultAdmin, "address of the node's admin")
}

// show makes a command that prints what the admin says at a path, as it is: it is to be read by programs.
func show(use, short, long, path string) *cobra.Command {
	var address string
	c := &cobra.Command{
		Use: use, Short: short, Long: long, Args: noArguments,
		Example: "  aetherctl " + use + "\n  aetherctl " + use + " --admin 127.0.0.1:9902",
		RunE: func(c *cobra.Command, _ []string) error {
			b, err := ask(c.Context(), address, path)
			if err != nil {
				return err
			}
			out := c.OutOrStdout()
			if p, ok := out.(plain.Writer); ok {
				out = p.Raw()
			}
			_, err = out.Write(b)
			return err
		},
	}
	adminFlag(c, &address)
	return c
}

func statusCommand() *cobra.Command {
	var address, output string
	c := &cobra.Command{
		Use: "status", Short: "Print what a node knows, from whom, and what is not in force", Args: noArguments,
		Long: `status prints which state a node has in force; what each of its sources (files, registrar,
Kubernetes, its own pods) has said, since when it is connected and when it last said
something; the last good state on disk; its pods and their certificates; and what of the
configuration is not in force, and why.

A source is connected; away (what it last said is in force); restored (not heard since the
start: what it said before is in force); or waited-for (nothing is known of it, and no state
can be in force). STALE is said where not everything is known to be true now.

With -o json it is one object: seq, at, synced, stale_since, sources, last_good, pods, loops,
problems, problems_total. New names may be added.`,
		Example: "  aetherctl status\n  aetherctl status -o json | jq .sources",
		RunE: func(c *cobra.Command, _ []string) error {
			if err := checkOutput(c, output); err != nil {
				return err
			}
			path := "/status?format=" + output
			b, err := ask(c.Context(), address, path)
			if err != nil {
				return err
			}
			_, err = c.OutOrStdout().Write(b)
			return err
		},
	}
	adminFlag(c, &address)
	outputFlag(c, &output)
	return c
}

func waitCommand() *cobra.Command {
	var address, what string
	var timeout time.Duration
	c := &cobra.Command{
		Use: "wait", Short: "Wait until a node has heard all of its sources", Args: noArguments,
		Long: `wait returns once every source of the node has said its whole state since the node's
start, and that is in force (--for=synced), or once the state of a sequence number is
(--for=seq=N), and prints the sequence number. Status 1: not within --timeout, and who has
not been heard.`,
		Example: "  aetherctl wait --for=synced\n  aetherctl wait --for=seq=12 --timeout 5s",
		RunE: func(c *cobra.Command, _ []string) error {
			if _, _, err := admin.ParseWait(what); err != nil {
				return usageError(c, fmt.Errorf("--%w", err)) // the error begins with the name
			}
			if timeout <= 0 {
				return usageError(c, fmt.Errorf("--timeout %s: give a time", timeout))
			}
			path := "/wait?" + url.Values{"for": {what}, "timeout": {timeout.String()}}.Encode()
			b, err := askWithin(c.Context(), timeout+askTime, http.MethodGet, address, path)
			if err != nil {
				return err
			}
			_, err = c.OutOrStdout().Write(b)
			return err
		},
	}
	adminFlag(c, &address)
	c.Flags().StringVar(&what, "for", "synced", "what to wait for: synced, or seq=N")
	c.Flags().DurationVar(&timeout, "timeout", 30*time.Second, "how long; 10m are the most")
	return c
}

func snapshotCommand() *cobra.Command {
	return show("snapshot", "Print the mesh a node has in force, as a configuration (YAML)",
		`snapshot prints the mesh that a node has in force, as a configuration that
'aetherctl explain --config' and 'aetherctl sniff --explain' read back. No secret is in it.`,
		"/snapshot")
}
