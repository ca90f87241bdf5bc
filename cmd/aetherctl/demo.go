package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"

	"aether/e2e/demo"
)

func demoCommand() *cobra.Command {
	var o demo.Options
	c := &cobra.Command{
		Use:   "demo",
		Short: "Show the mesh at work: two nodes, four pods, on this machine",
		Long: `demo makes two nodes and four pods as network namespaces, runs an aether-proxy on
each node, sends captured HTTP/1.1, h2c, gRPC, raw TCP, server-first and wrong-port
traffic, and shows every answer beside its explanation. It needs root, ip and nft,
and takes everything down again.`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if o.Proxy == "" {
				p, err := beside("aether-proxy")
				if err != nil {
					return err
				}
				o.Proxy = p
			}
			ctx, stop := signal.NotifyContext(c.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			o.Out = c.OutOrStdout()
			return demo.Run(ctx, o)
		},
	}
	c.Flags().StringVar(&o.Proxy, "proxy", "", "the aether-proxy binary; default: beside this one, or in PATH")
	c.Flags().BoolVar(&o.Keep, "keep", false, "leave it running, with the commands to try, until interrupted")
	return c
}

// beside finds a binary of ours: where this one is, or in PATH.
func beside(name string) (string, error) {
	if me, err := os.Executable(); err == nil {
		p := filepath.Join(filepath.Dir(me), name)
		if _, err := os.Stat(p); err == nil {
			return p, nil
		}
	}
	p, err := exec.LookPath(name)
	if errors.Is(err, exec.ErrNotFound) {
		return "", fmt.Errorf("%s is neither beside aetherctl nor in PATH: build it with 'make build', or name it with --proxy", name)
	}
	return p, err
}
