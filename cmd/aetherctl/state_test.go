package main

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"unicode"

	"aether/dataplane"
	"aether/dataplane/admin"
	"aether/dataplane/journal"
)

// TestOpenOfNode asks a node's own admin, as a user does.
func TestOpenOfNode(t *testing.T) {
	node, err := dataplane.New(dataplane.Config{Identities: nobody{}, Journal: journal.NewRing(1)})
	if err != nil {
		t.Fatal(err)
	}
	level := new(slog.LevelVar)
	srv := httptest.NewServer(admin.Handler(admin.Config{Node: node, Metrics: http.NotFoundHandler(), Level: level}))
	defer srv.Close()
	address := strings.TrimPrefix(srv.URL, "http://")
	for _, tt := range []struct {
		args   string
		status int
		want   string
	}{
		{"certs", 0, "POD  STATE  ENDS-IN"},
		{"certs -o json", 0, ""},
		{"connections", 2, "loop 0 did not answer"}, // the node does not run
		{"connections --limit 0", 2, `--limit: "0" is no number from 1 to 2000`},
		{"sessions --pod web", 2, `--pod: "web" is not namespace/name`},
		{"certs -o yaml", 2, "the formats are text and json"},
		{"loglevel", 0, "info\n"},
		{"loglevel debug", 0, "debug\n"},
		{"loglevel loud", 2, `"loud" is no level; the levels are debug info warn error`},
		{"loglevel", 0, "debug\n"},
	} {
		status, out, errs := aetherctl(t, "", append(strings.Fields(tt.args), "--admin", address)...)
		if status != tt.status || !strings.Contains(out+errs, tt.want) || tt.want == "" && out+errs != "" {
			t.Errorf("%s: status %d, want %d with %q; printed:\n%s%s", tt.args, status, tt.status, tt.want, out, errs)
		}
	}
	if level.Level() != slog.LevelDebug {
		t.Errorf("the level is %s", level.Level())
	}
}

// TestPartialAnswer: what there is is printed, what is missing is said, and the status says so.
func TestPartialAnswer(t *testing.T) {
	answer := ""
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, answer)
	}))
	defer srv.Close()
	address := strings.TrimPrefix(srv.URL, "http://")
	for _, tt := range []struct {
		args, answer string
		status       int
		out, errs    string
	}{
		{"connections", `{"connections":[{"pod":"shop/web-1","role":"captured","state":"idle"}],"total":1,"silent_loops":[0]}`, 2, "shop/web-1", "loop 0 did not answer"},
		{"connections -o json", `{"connections":[{"pod":"shop/web-1","role":"captured","state":"idle"}],"total":9}`, 0, `{"pod":"shop/web-1",`, "1 of 9 are shown"},
		{"sessions -o json", `{"sessions":[{"pod":"shop/web-1","state":"ready","certificates_until":"2026-01-02T03:04:05Z"}],"total":1,"silent_loops":[0,2]}`, 2, `"certificates_until":"2026-01-02T03:04:05Z"`, "loop 2 did not answer"},
		{"endpoints", `{"endpoints":[{"pod":"shop/web-1","destination":"shop/cart:8080","open":3}],"total":1}`, 0, "shop/cart:8080", ""},
		{"endpoints -o json", `{"endpoints":[{"pod":"shop/web-1","ejected_ms":1500}],"total":1,"silent_loops":[1]}`, 2, `"ejected_ms":1500`, "loop 1 did not answer"},
		{"certs", `no JSON`, 1, "", "another version's"},
	} {
		answer = tt.answer
		status, out, errs := aetherctl(t, "", append(strings.Fields(tt.args), "--admin", address)...)
		if status != tt.status || !strings.Contains(out, tt.out) || !strings.Contains(errs, tt.errs) {
			t.Errorf("%s: status %d, want %d with %q and %q; printed:\n%s\n%s", tt.args, status, tt.status, tt.out, tt.errs, out, errs)
		}
	}
}

// TestOutputIsPlain: nothing of what a node answers reaches the terminal as something to act upon, but for a
// snapshot, which is a configuration that has to be read back. The node is asked by no name, as it wants to be.
func TestOutputIsPlain(t *testing.T) {
	const hostile = "\x1b[2J\u009b2J\u202e\u2066"
	status, host := http.StatusOK, ""
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host = r.Host
		w.WriteHeader(status)
		if r.FormValue("format") == "json" {
			fmt.Fprintf(w, "[{\"path\":\"%s\"}]\n", hostile[4:])
		} else {
			fmt.Fprintln(w, hostile)
		}
	}))
	defer srv.Close()
	address := strings.TrimPrefix(srv.URL, "http://")
	for _, args := range []string{"why", "why -o json", "status", "wait", "explain flow", "loglevel", "snapshot"} {
		for status = range map[int]bool{http.StatusOK: true, http.StatusNotFound: true} {
			_, out, errs := aetherctl(t, "", append(strings.Fields(args), "--admin", address)...)
			raw := args == "snapshot" && status == http.StatusOK
			if raw && out != hostile+"\n" {
				t.Errorf("%s: %q", args, out)
			}
			if i := strings.IndexFunc(out+errs, func(r rune) bool { return !unicode.IsPrint(r) && r != '\n' && r != '\t' }); i >= 0 && !raw || out+errs == "" {
				t.Errorf("%s, status %d: %q %q", args, status, out, errs)
			}
		}
		if host != "localhost" {
			t.Errorf("%s: asked for the host %q", args, host)
		}
	}
	if _, _, errs := aetherctl(t, "", "explain", "--config", hostile, "shop/web > proxy"); !strings.Contains(errs, `\u009b`) {
		t.Errorf("an error names the file: %q", errs)
	}
}
