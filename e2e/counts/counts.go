// Package counts lets tests say how much they looked at, where a passing run
// prints nothing of its own: `make test` shows the lines at its end.
package counts

import (
	"fmt"
	"os"
	"testing"
)

// Env names the file that lines are appended to; not set: they are only logged.
const Env = "AETHER_TEST_COUNTS"

// Say logs a line of tb's and appends it to the file.
func Say(tb testing.TB, format string, args ...any) {
	tb.Helper()
	line := fmt.Sprintf(format, args...)
	tb.Log(line)
	path := os.Getenv(Env)
	if path == "" {
		return
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
	if err == nil {
		// One write: tests of several packages run at once.
		_, err = f.WriteString(tb.Name() + ": " + line + "\n")
		if cerr := f.Close(); err == nil {
			err = cerr
		}
	}
	if err != nil {
		tb.Errorf("counts: %v", err)
	}
}
