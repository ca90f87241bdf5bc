package main

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"aether/dataplane/admin"
)

func whyCommand() *cobra.Command {
	var address, output string
	f := admin.Filter{Lines: 20}
	c := &cobra.Command{
		Use:   "why",
		Short: "Print a node's last decisions, newest first",
		Long: `why prints what became of the last connections and requests of a node, the newest
first, a line each. A node keeps the last few hundred, and as many refusals and
failures beside them (--bad). Filters are put together with and.

After its time a line begins with a flow: an argument for 'aetherctl explain'.

With -o json a line is an object: at, took_ms, kind (request or connection), pod
(namespace and ServiceAccount), pod_name, container, flow, request, action, reason, rule, status, backend, endpoint,
peer, bytes_in, bytes_out, attempts, ended, cause, outcome, flags, details, bad, snapshot. What is
empty is left out; new names may be added.`,
		Example: `  aetherctl why --bad
  aetherctl why --pod shop/web --reason port-mismatch,port-not-declared
  aetherctl why --service shop/cart -n 200 -o json | jq 'select(.took_ms > 100)'`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := checkOutput(c, output); err != nil {
				return err
			}
			q := f.Values()
			if _, err := admin.ParseFilter(q); err != nil {
				dashes := "--" // the error begins with the name that /why has for the flag
				if strings.HasPrefix(err.Error(), "n:") {
					dashes = "-"
				}
				return usageError(c, fmt.Errorf("%s%w", dashes, err))
			}
			q.Set("format", output)
			b, err := ask(c.Context(), address, "/why?"+q.Encode())
			if err != nil {
				return err
			}
			if output == "text" {
				if len(b) == 0 {
					fmt.Fprintln(c.ErrOrStderr(), "no decision of those that the node keeps is like that")
				}
				_, err = c.OutOrStdout().Write(b)
				return err
			}
			var lines []json.RawMessage
			if err := json.Unmarshal(b, &lines); err != nil {
				return fmt.Errorf("admin at %s: its answer is no list of decisions (is it another version's?): %w", address, err)
			}
			for _, l := range lines {
				if _, err := fmt.Fprintf(c.OutOrStdout(), "%s\n", l); err != nil {
					return err
				}
			}
			return nil
		},
	}
	adminFlag(c, &address)
	outputFlag(c, &output)
	c.Flags().IntVarP(&f.Lines, "lines", "n", f.Lines, "how many, at most")
	c.Flags().BoolVar(&f.Bad, "bad", false, "refusals and failures only")
	c.Flags().StringVar(&f.Pod, "pod", "", "of this pod only, or of this ServiceAccount where no pod has the name: NAMESPACE/NAME")
	c.Flags().StringSliceVar(&f.Reasons, "reason", nil, "with one of these reasons only")
	c.Flags().StringVar(&f.Service, "service", "", "to this service only, or with a Host that names it: NAMESPACE/NAME")
	return c
}
