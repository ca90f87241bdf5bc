// Command aetherctl is the tool for whoever runs or debugs an aether mesh.
//
// Exit status: 0 when it did what was asked, 1 when it could not, 2 when the
// command line is wrong or part of the input could not be read (what could be is shown).
//
// It holds wiring and printing only: what it shows comes from the packages that
// the proxy itself uses.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	"aether/dataplane/plain"
)

// commands are the subcommands, in the order that help shows them. A new one is a
// function in a file of its own, and a line here.
func commands() []*cobra.Command {
	return []*cobra.Command{
		demoCommand(),
		explainCommand(),
		whyCommand(),
		statusCommand(),
		waitCommand(),
		connectionsCommand(),
		sessionsCommand(),
		endpointsCommand(),
		certsCommand(),
		loglevelCommand(),
		snapshotCommand(),
		sniffCommand(),
		versionCommand(),
	}
}

func main() { os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr)) }

// run is main with its surroundings passed in; it returns the exit status.
func run(args []string, in io.Reader, out, errs io.Writer) int {
	root := &cobra.Command{
		Use:   "aetherctl",
		Short: "Look into an aether mesh, and try it out",
		Long: `aetherctl looks into an aether mesh, and tries it out.

Nothing here changes a cluster unless its help says so.`,
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: true},
	}
	cobra.EnableCommandSorting = false
	root.AddCommand(commands()...)
	root.SetArgs(args)
	root.SetIn(in)
	root.SetOut(plain.NewWriter(out)) // it may hold anybody's bytes, and be a terminal
	root.SetErr(errs)
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error { return usageError(c, err) })

	err := root.Execute()
	if err == nil {
		return 0
	}
	fmt.Fprintln(plain.NewWriter(errs), "aetherctl:", err)
	if st, ok := errors.AsType[*statusError](err); ok {
		return st.status
	}
	if strings.HasPrefix(err.Error(), "unknown command ") { // cobra's, which has no type
		return 2
	}
	return 1
}

// statusError is an error that ends aetherctl with a status of its own.
type statusError struct {
	status int
	error
}

func (e *statusError) Unwrap() error { return e.error }

// usageError makes err, about the command line of c, one that ends with status 2 and
// says where help is.
func usageError(c *cobra.Command, err error) error {
	return &statusError{2, fmt.Errorf("%w (see '%s --help')", err, c.CommandPath())}
}

// atLeastOne asks for an argument, called what in the message.
func atLeastOne(what string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) == 0 {
			return usageError(c, fmt.Errorf("%s is missing", what))
		}
		return nil
	}
}

func noArguments(c *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usageError(c, fmt.Errorf("%q is one argument too many", args[0]))
	}
	return nil
}

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print what this aetherctl was built from",
		Args:  noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(c.OutOrStdout(), version())
			return err
		},
	}
}

// version says which commit the binary was built from, as far as the Go tool noted it.
func version() string {
	commit, changed := "unknown commit", ""
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			switch {
			case s.Key == "vcs.revision":
				commit = s.Value[:min(12, len(s.Value))]
			case s.Key == "vcs.modified" && s.Value == "true":
				changed = " with changes"
			}
		}
	}
	return fmt.Sprintf("aetherctl %s%s %s %s/%s", commit, changed, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
