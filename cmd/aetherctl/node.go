package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

const defaultAdmin = "127.0.0.1:9901"

// maxAnswer bounds what is read of an admin's answer.
const maxAnswer = 64 << 20

// ask gets a path of a node's admin.
func ask(ctx context.Context, address, path string) ([]byte, error) {
	return askBy(ctx, http.MethodGet, address, path)
}

// askBy is ask with another method.
func askBy(ctx context.Context, method, address, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "http://"+address+path, nil)
	if err != nil {
		return nil, fmt.Errorf("--admin %q: %w", address, err)
	}
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

// show makes a command that prints what the admin says at a path.
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
			_, err = c.OutOrStdout().Write(b)
			return err
		},
	}
	adminFlag(c, &address)
	return c
}

func statusCommand() *cobra.Command {
	return show("status", "Print a node's pods, certificates, loops and problems (JSON)",
		`status prints what a node is doing, as JSON: the sequence number and time of the state
in force (seq, at), its pods with their listeners and certificates (pods), its event
loops (loops), and what of the configuration is not in force, and why (problems).`,
		"/status")
}

func snapshotCommand() *cobra.Command {
	return show("snapshot", "Print the mesh a node has in force, as a configuration (YAML)",
		`snapshot prints the mesh that a node has in force, as a configuration that
'aetherctl explain --config' and 'aetherctl sniff --explain' read back. No secret is in it.`,
		"/snapshot")
}
