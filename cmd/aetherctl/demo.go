package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"

	"aether/e2e/demo"
	"aether/e2e/tool"
)

func demoCommand() *cobra.Command {
	var o demo.Options
	var registry string
	var servers demo.Registry
	c := &cobra.Command{
		Use:   "demo",
		Short: "Show the mesh at work: two nodes, four pods, on this machine",
		Long: `demo makes two nodes and four pods as network namespaces, runs an aether-proxy on
each node, sends captured HTTP/1.1, h2c, gRPC, raw TCP, server-first and wrong-port
traffic, and shows every answer beside its explanation. It needs root, ip and nft,
and takes everything down again.

With --registry etcd the nodes know of each other's pods by an aether-registrar over a
real etcd, whose binary is built once from the module that pins it, unless --etcd or
the environment's AETHER_ETCD names one: run it in this repository, with Go.`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if o.Proxy == "" {
				p, err := beside("aether-proxy", "--proxy")
				if err != nil {
					return err
				}
				o.Proxy = p
			}
			ctx, stop := signal.NotifyContext(c.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			switch registry {
			case "none":
				if servers != (demo.Registry{}) {
					return errors.New("--registrar and --etcd are of use with --registry etcd alone")
				}
			case "etcd":
				if err := find(ctx, &servers); err != nil {
					return err
				}
				o.Registry = &servers
			default:
				return fmt.Errorf("--registry: %q is neither none nor etcd", registry)
			}
			o.Out = c.OutOrStdout()
			return demo.Run(ctx, o)
		},
	}
	c.Flags().StringVar(&o.Proxy, "proxy", "", "the aether-proxy binary; default: beside this one, or in PATH")
	c.Flags().BoolVar(&o.Keep, "keep", false, "leave it running, with the commands to try, until interrupted")
	c.Flags().StringVar(&registry, "registry", "none", "how nodes know of each other's pods: none (all of them read files) or etcd (a registrar over a real etcd)")
	c.Flags().StringVar(&servers.Registrar, "registrar", "", "with --registry etcd: the aether-registrar binary; default as for --proxy")
	c.Flags().StringVar(&servers.Etcd, "etcd", "", "with --registry etcd: the etcd binary; default: built, once")
	return c
}

// find fills in the binaries of a registry that are not named.
func find(ctx context.Context, r *demo.Registry) (err error) {
	if r.Registrar == "" {
		if r.Registrar, err = beside("aether-registrar", "--registrar"); err != nil {
			return err
		}
	}
	if r.Etcd == "" {
		r.Etcd, err = tool.Etcd.Build(ctx)
	}
	return err
}

// beside finds a binary of ours: where this one is, or in PATH.
func beside(name, flag string) (string, error) {
	if me, err := os.Executable(); err == nil {
		p := filepath.Join(filepath.Dir(me), name)
		if _, err := os.Stat(p); err == nil {
			return p, nil
		}
	}
	p, err := exec.LookPath(name)
	if errors.Is(err, exec.ErrNotFound) {
		return "", fmt.Errorf("%s is neither beside aetherctl nor in PATH: build it with 'make build', or name it with %s", name, flag)
	}
	return p, err
}
