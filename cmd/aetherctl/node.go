package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"aether/controlplane/compile"
	"aether/controlplane/file"
	"aether/dataplane/admin"
	"aether/dataplane/model"
)

const defaultAdmin = "127.0.0.1:9901"

// maxAnswer bounds what is read of an admin's answer.
const maxAnswer = 64 << 20

// ask gets a path of a node's admin.
func ask(ctx context.Context, address, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+path, nil)
	if err != nil {
		return nil, fmt.Errorf("--admin %q: %w", address, err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("no answer from the admin at %s; it listens in the node's own network namespace: %w", address, err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, maxAnswer))
	if err != nil {
		return nil, fmt.Errorf("admin at %s: %w", address, err)
	}
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("admin at %s: %s: %s", address, res.Status, strings.TrimSpace(string(b)))
	}
	return b, nil
}

func explainCommand() *cobra.Command {
	var address, config, node, domain, trust string
	c := &cobra.Command{
		Use:   "explain FLOW [REQUEST]",
		Short: "Tell what becomes of a connection, and of a request on it, and why",
		Long: `explain asks the decision core of a running node (--admin), or of one made from a
configuration directory (--config and --node), what it does with a flow: the
verdict, each step, and the candidates that lost.

A flow is a pod's ServiceAccount, what it dials, what its first bytes are, and the
authority of the first request:

    shop/web > 10.96.0.10:8080                           before the first byte
    shop/web > 10.96.0.10:8080 http1 host=cart:9090      a captured request
    shop/web > proxy http1 host=cart.shop.aether.internal:8080
    shop/cart < 8080 h2c peer=spiffe://td/ns/shop/sa/web  at the destination

A request is 'GET cart:8080/items?x=1 h:version=2'; without one, a flow that is HTTP
is explained with 'GET <host>/'.`,
		Example: `  aetherctl explain 'shop/web > 10.96.0.10:8080 http1 host=cart:9090'
  aetherctl explain --config deploy/ --node node1 'shop/web > 10.96.0.10:8080' 'POST cart/items'`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) < 1 || len(args) > 2 {
				return usageError(c, errors.New("one FLOW and at most one REQUEST, each quoted"))
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			flow, request := args[0], ""
			f, err := model.ParseFlow(flow)
			if err != nil {
				return usageError(c, err)
			}
			switch {
			case len(args) == 2:
				request = args[1]
			case f.Sniff == model.SniffHTTP10, f.Sniff == model.SniffHTTP11, f.Sniff == model.SniffH2C:
				request = "GET " + f.Host + "/"
			}
			if config == "" {
				q := url.Values{"flow": {flow}}
				if request != "" {
					q.Set("request", request)
				}
				b, err := ask(c.Context(), address, "/explain?"+q.Encode())
				if err != nil {
					return err
				}
				_, err = c.OutOrStdout().Write(b)
				return err
			}
			if node == "" {
				return usageError(c, errors.New("--config needs --node"))
			}
			mesh, problems := file.Load(config, file.Options{Node: node, Domain: domain, TrustDomain: trust, RedirectAllDefault: true})
			snap, more := compile.Compile(mesh)
			for _, p := range append(problems, more...) {
				fmt.Fprintln(c.ErrOrStderr(), "not in force:", problemText(p))
			}
			e, err := admin.Explain(snap, flow, request)
			if err != nil {
				return usageError(c, err)
			}
			_, err = fmt.Fprint(c.OutOrStdout(), e)
			return err
		},
	}
	adminFlag(c, &address)
	c.Flags().StringVar(&config, "config", "", "explain by this configuration directory instead of a running node")
	c.Flags().StringVar(&node, "node", "", "with --config: the node whose pods are local")
	c.Flags().StringVar(&domain, "mesh-domain", model.DefaultDomain, "with --config: domain of mesh names")
	c.Flags().StringVar(&trust, "trust-domain", "", "with --config: SPIFFE trust domain; default the mesh domain")
	return c
}

func problemText(p model.Problem) string {
	s := p.Object + ": " + p.Reason
	if p.Where != "" {
		s = p.Where + ": " + s
	}
	return s
}

func adminFlag(c *cobra.Command, address *string) {
	c.Flags().StringVar(address, "admin", defaultAdmin, "address of the node's admin")
}

// show makes a command that prints what the admin says at a path.
func show(use, short string, path func() string, flags func(*cobra.Command)) *cobra.Command {
	var address string
	c := &cobra.Command{
		Use: use, Short: short, Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			b, err := ask(c.Context(), address, path())
			if err != nil {
				return err
			}
			_, err = c.OutOrStdout().Write(b)
			return err
		},
	}
	adminFlag(c, &address)
	if flags != nil {
		flags(c)
	}
	return c
}

func whyCommand() *cobra.Command {
	n, bad := 20, false
	return show("why", "Print a node's last decisions, newest first",
		func() string {
			p := "/why?n=" + strconv.Itoa(cmp.Or(n, 1))
			if bad {
				p += "&bad=1"
			}
			return p
		},
		func(c *cobra.Command) {
			c.Flags().IntVarP(&n, "lines", "n", n, "how many")
			c.Flags().BoolVar(&bad, "bad", false, "refusals and failures only")
		})
}

func statusCommand() *cobra.Command {
	return show("status", "Print a node's pods, certificates, loops and problems (JSON)", func() string { return "/status" }, nil)
}

func snapshotCommand() *cobra.Command {
	return show("snapshot", "Print the mesh a node has in force, as a configuration (YAML)", func() string { return "/snapshot" }, nil)
}
