package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"aether/dataplane"
	"aether/dataplane/admin"
)

// list makes a command that prints what the admin has open at path: print writes the
// answer, as a table or a line of JSON an item, and returns the loops that are missing in it.
func list(use, short, long, path string, print func(w io.Writer, answer []byte, asJSON bool) (notes []string, partial bool, err error)) *cobra.Command {
	var address, output string
	var s admin.Selection
	c := &cobra.Command{
		Use: use, Short: short, Long: long, Args: noArguments,
		Example: "  aetherctl " + use + "\n  aetherctl " + use + " --pod shop/web-1 -o json | jq .state",
		RunE: func(c *cobra.Command, _ []string) error {
			if err := checkOutput(c, output); err != nil {
				return err
			}
			q := s.Values()
			q.Set("limit", strconv.Itoa(s.Limit)) // 0 is no limit of a user's
			if _, err := admin.ParseSelection(q); err != nil {
				return usageError(c, fmt.Errorf("--%w", err)) // the error begins with the name
			}
			q.Set("format", "json")
			b, err := ask(c.Context(), address, path+"?"+q.Encode())
			if err != nil {
				return err
			}
			notes, partial, err := print(c.OutOrStdout(), b, output == "json")
			if err != nil {
				return fmt.Errorf("admin at %s: its answer cannot be read (is it another version's?): %w", address, err)
			}
			if partial {
				return &statusError{2, fmt.Errorf("admin at %s: %s", address, strings.Join(notes, "; "))}
			}
			if output == "json" {
				for _, n := range notes {
					fmt.Fprintln(c.ErrOrStderr(), n)
				}
			}
			return nil
		},
	}
	adminFlag(c, &address)
	outputFlag(c, &output)
	c.Flags().StringVar(&s.Pod, "pod", "", "of this pod only: NAMESPACE/NAME")
	c.Flags().IntVar(&s.Limit, "limit", 200, "how many, at most; 2000 are the most")
	return c
}

// items prints a line of JSON each.
func items[T any](w io.Writer, all []T) error {
	for i := range all {
		if err := jsonLine(w, &all[i]); err != nil {
			return err
		}
	}
	return nil
}

func connectionsCommand() *cobra.Command {
	return list("connections", "Print the connections that a node carries now",
		`connections prints what a node carries now, oldest first within a pod and role: captured
connections and those to the proxy port, inbound ones of other nodes, its own to
applications, and relays (raw TCP and what passes through).

State is sniff (its first bytes are waited for), idle, head, request, response, stream,
connect, tunnel (an open upgrade), drain, linger or relay. Bytes are the socket's, TLS included; a relay's are told
when it ends ('aetherctl why').

With -o json a line is an object: pod, loop, role, client, destination, peer, protocol, state,
age_ms, idle_ms, requests, streams, bytes_in, bytes_out. What is unknown is left out;
new names may be added. Status 2: an event loop did not answer, and its part is missing.`,
		"/connections", func(w io.Writer, b []byte, asJSON bool) ([]string, bool, error) {
			var c dataplane.Connections
			if err := json.Unmarshal(b, &c); err != nil {
				return nil, false, err
			}
			notes := admin.Notes(len(c.Connections), c.Total, c.Silent)
			if asJSON {
				return notes, len(c.Silent) > 0, items(w, c.Connections)
			}
			admin.WriteConnections(w, &c)
			return notes, len(c.Silent) > 0, nil
		})
}

func sessionsCommand() *cobra.Command {
	return list("sessions", "Print a node's mTLS sessions to other nodes",
		`sessions prints the HTTP/2 sessions over mTLS that a node's pods hold to the endpoints
they call: whose they are, the endpoint and the service's port, how many streams are under
way and how many requests wait, and how long the certificates of both ends hold.

State is connect (being dialled), ready, full (takes no more streams now), or drain (takes
none any more: by GOAWAY, or because its certificates are about to end).

With -o json a line is an object: pod, loop, identity, endpoint, port, peer, state, streams,
requests, waiting, age_ms, idle_ms, bytes_in, bytes_out, certificates_until. New names may
be added. Status 2: an event loop did not answer, and its part is missing.`,
		"/sessions", func(w io.Writer, b []byte, asJSON bool) ([]string, bool, error) {
			var c dataplane.Sessions
			if err := json.Unmarshal(b, &c); err != nil {
				return nil, false, err
			}
			notes := admin.Notes(len(c.Sessions), c.Total, c.Silent)
			if asJSON {
				return notes, len(c.Silent) > 0, items(w, c.Sessions)
			}
			admin.WriteSessions(w, &c, time.Now())
			return notes, len(c.Silent) > 0, nil
		})
}

func endpointsCommand() *cobra.Command {
	return list("endpoints", "Print what a node's pods have learnt of the endpoints that they call",
		`endpoints prints, for each pod of a node and each endpoint that it has called lately, what
decides whether it is chosen again: requests (or raw-TCP connections) under way, sessions,
latency up to the answer's head (a peak that fades), recent failures (fading), and whether
it is ejected, for how long yet, and how often it was. A pod learns by itself: what one
knows is held against the endpoint by no other.

With -o json a line is an object: pod, loop, destination, endpoint, open, sessions,
latency_ms, trouble, ejected_ms, ejections. New names may be added. Status 2: an event loop
did not answer, and its part is missing.`,
		"/endpoints", func(w io.Writer, b []byte, asJSON bool) ([]string, bool, error) {
			var c dataplane.Endpoints
			if err := json.Unmarshal(b, &c); err != nil {
				return nil, false, err
			}
			notes := admin.Notes(len(c.Endpoints), c.Total, c.Silent)
			if asJSON {
				return notes, len(c.Silent) > 0, items(w, c.Endpoints)
			}
			admin.WriteEndpoints(w, &c)
			return notes, len(c.Silent) > 0, nil
		})
}

func certsCommand() *cobra.Command {
	return list("certs", "Print the certificates and trust bundles of a node's pods",
		`certs prints, for each pod of a node, the certificate that it shows to others and the
bundle that it trusts: whether it is valid, expired or missing, when it ends and how old it
is. Nothing secret is in it.

With -o json a line is an object: pod, container, wanted, state, spiffe_id, serial, issuer,
not_before, not_after, age_ms, trust_domain, bundle (subject, serial and not_after of
each authority). New names may be added.`,
		"/certs", func(w io.Writer, b []byte, asJSON bool) ([]string, bool, error) {
			var c dataplane.Certificates
			if err := json.Unmarshal(b, &c); err != nil {
				return nil, false, err
			}
			notes := admin.Notes(len(c.Certificates), c.Total, nil)
			if asJSON {
				return notes, false, items(w, c.Certificates)
			}
			admin.WriteCertificates(w, &c, time.Now())
			return notes, false, nil
		})
}

func loglevelCommand() *cobra.Command {
	var address string
	c := &cobra.Command{
		Use:   "loglevel [" + strings.Join(admin.Levels, "|") + "]",
		Short: "Print a node's log level, or set it while the node runs",
		Long: `loglevel prints the level of a node's log; with an argument it sets it, until the node
is restarted, when its --log-level holds again.`,
		Example: "  aetherctl loglevel\n  aetherctl loglevel debug",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			method, path := http.MethodGet, "/loglevel"
			if len(args) == 1 {
				if !slices.Contains(admin.Levels, args[0]) {
					return usageError(c, fmt.Errorf("%q is no level; the levels are %s", args[0], strings.Join(admin.Levels, " ")))
				}
				method, path = http.MethodPut, "/loglevel?"+url.Values{"level": args}.Encode()
			}
			b, err := askBy(c.Context(), method, address, path)
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
