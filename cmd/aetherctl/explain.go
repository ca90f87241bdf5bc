package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"

	"github.com/spf13/cobra"

	"aether/dataplane/admin"
	"aether/dataplane/model"
)

func explainCommand() *cobra.Command {
	var address, config, output string
	var o meshFlags
	c := &cobra.Command{
		Use:   "explain FLOW [REQUEST]",
		Short: "Tell what becomes of a connection, and of a request on it, and why",
		Long: `explain asks the decision core of a running node (--admin), or of one made from a
configuration (--config: a directory of YAML, a file such as 'aetherctl snapshot'
prints, or - for standard input), what it does with a flow: the verdict, each step,
and the candidates that lost. Of what is refused it says which ports and names there
are, and gives flows that would have worked.

A flow is a pod's namespace and ServiceAccount, what it dials, what its first bytes
are, and the authority of the first request:

    shop/web > 10.96.0.10:8080                           before the first byte
    shop/web > 10.96.0.10:8080 http1 host=cart:9090      a captured request
    shop/web > proxy http1 host=cart.shop.aether.internal:8080
    shop/cart < 8080 h2c peer=spiffe://td/ns/shop/sa/web  at the destination

A request is 'GET cart:8080/items?x=1 h:version=2'; without one, a flow that is HTTP
is explained with 'GET <host>/'.

With -o json it is one object: flow, request, verdict (text), action, reason, rule,
status, backend, text (what a refused client reads), snapshot (version), steps, and for
what is refused advice: text, service, ports, names, try. New names may be added.`,
		Example: `  aetherctl explain 'shop/web > 10.96.0.10:8080 http1 host=cart:9090'
  aetherctl explain --config deploy/ 'shop/web > 10.96.0.10:8080' 'POST cart/items'
  aetherctl snapshot | aetherctl explain --config - -o json 'shop/web > proxy http1 host=cart'`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) < 1 || len(args) > 2 {
				return usageError(c, errors.New("one FLOW and at most one REQUEST, each quoted"))
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			if err := checkOutput(c, output); err != nil {
				return err
			}
			f, err := model.ParseFlow(args[0])
			if err != nil {
				return usageError(c, err)
			}
			request := ""
			switch {
			case len(args) == 2:
				request = args[1]
				if _, err := model.ParseRequest(request); err != nil {
					return usageError(c, err)
				}
			case f.Sniff == model.SniffHTTP10, f.Sniff == model.SniffHTTP11, f.Sniff == model.SniffH2C:
				h := requestFor(f.Host)
				request = model.RequestString(&h)
			}
			if config == "" {
				if only := cmp.Or(changed(c, "node"), changed(c, "mesh-domain"), changed(c, "trust-domain")); only != "" {
					return usageError(c, fmt.Errorf("--%s is for --config; a running node knows it", only))
				}
				q := url.Values{"flow": {args[0]}, "format": {output}}
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
			if changed(c, "admin") != "" {
				return usageError(c, errors.New("--config and --admin exclude each other"))
			}
			m, err := openMesh(config, c.InOrStdin(), o, c.ErrOrStderr())
			if err != nil {
				return err
			}
			defer m.close()
			snap, err := m.of(model.ServiceName{Namespace: f.Namespace, Name: f.Workload})
			if err != nil {
				return err
			}
			e, err := admin.Explain(snap, args[0], request)
			if err != nil {
				return usageError(c, err)
			}
			if output == "json" {
				return jsonLine(c.OutOrStdout(), e)
			}
			_, err = fmt.Fprint(c.OutOrStdout(), e)
			return err
		},
	}
	adminFlag(c, &address)
	outputFlag(c, &output)
	c.Flags().StringVar(&config, "config", "", "explain by this configuration directory or snapshot file (- is standard input) instead of a running node")
	o.add(c, "with --config: ")
	return c
}

// changed is name if the user set that flag, else "".
func changed(c *cobra.Command, name string) string {
	if c.Flags().Changed(name) {
		return name
	}
	return ""
}

func outputFlag(c *cobra.Command, output *string) {
	c.Flags().StringVarP(output, "output", "o", "text", "format: text or json")
}

// checkOutput checks the value of -o.
func checkOutput(c *cobra.Command, output string) error {
	if output == "text" || output == "json" {
		return nil
	}
	return usageError(c, fmt.Errorf("-o %s: the formats are text and json", output))
}

// jsonLine prints v as one line.
func jsonLine(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}
