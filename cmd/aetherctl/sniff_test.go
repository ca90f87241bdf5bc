package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const captures = "../../sniff/replay/testdata/"

// aetherctl runs the tool and returns what it printed.
func aetherctl(t *testing.T, in string, args ...string) (status int, out, errs string) {
	t.Helper()
	var o, e bytes.Buffer
	status = run(args, strings.NewReader(in), &o, &e)
	return status, o.String(), e.String()
}

// fields are the columns of each line of a table.
func fields(s string) (rows []string) {
	for l := range strings.Lines(s) {
		rows = append(rows, strings.Join(strings.Fields(l), " "))
	}
	return rows
}

const heading = "FILE FRAME CLIENT SERVER CLASS NAME ALPN FIRST SENT RECV AFTER NOTES"

func TestSniffText(t *testing.T) {
	file := captures + "arkime/tls-split-client-hello.pcap"
	status, out, errs := aetherctl(t, "", "sniff", file)
	want := []string{heading, file + " 1 10.1.17.215:49927 142.250.114.100:443 tls clients2.google.com h2,http/1.1 client 2521 10151 1729/2 -"}
	if got := fields(out); status != 0 || errs != "" || strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("status %d, errors %q\n%s\nwant\n%s", status, errs, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	for i, l := range fields(out) {
		if n := len(strings.Fields(l)); n != 12 {
			t.Errorf("line %d has %d columns", i+1, n)
		}
	}
}

func TestSniffJSON(t *testing.T) {
	b, err := os.ReadFile(captures + "zeek/tcp_missing-syn.pcap")
	if err != nil {
		t.Fatal(err)
	}
	status, out, errs := aetherctl(t, string(b), "sniff", "-o", "json", "-")
	var l flowLine
	if err := json.Unmarshal([]byte(out), &l); err != nil || status != 0 || errs != "" {
		t.Fatalf("status %d, errors %q, %v: %s", status, errs, err, out)
	}
	if l.File != "-" || l.Class != "http/1.0" || l.Name != "www.icir.org" || l.First != "client" || l.AfterSegs != 1 {
		t.Errorf("%+v", l)
	}
}

// TestSniffBadFile: a file that cannot be read is said, by name and reason, and
// does not keep the others from being shown.
func TestSniffBadFile(t *testing.T) {
	text := filepath.Join(t.TempDir(), "notes.txt")
	if err := os.WriteFile(text, []byte("no capture"), 0o600); err != nil {
		t.Fatal(err)
	}
	good := captures + "gopacket/test_ethernet.pcap"
	status, out, errs := aetherctl(t, "", "sniff", "nowhere.pcap", text, good)
	if status != 2 {
		t.Errorf("status %d, want 2", status)
	}
	if rows := fields(out); len(rows) != 2 || !strings.HasPrefix(rows[1], good+" 1 10.1.1.2:44644 10.1.1.1:80 http/1.1 ") {
		t.Errorf("output:\n%s", out)
	}
	for _, want := range []string{
		"aetherctl: nowhere.pcap: no such file or directory\n",
		"aetherctl: " + text + ": not a capture: ",
		"aetherctl: 2 of 3 files could not be read, or only in part\n",
	} {
		if !strings.Contains(errs, want) {
			t.Errorf("errors lack %q:\n%s", want, errs)
		}
	}
}

func TestPlain(t *testing.T) {
	for in, want := range map[string]string{
		"cart:8080": "cart:8080", "\x1b[31m": "%1b[31m", "a b\tc": "a%20b%09c", "100%": "100%25", "é": "%c3%a9", "": "",
	} {
		if got := plain(in); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}

func TestUsage(t *testing.T) {
	for _, tt := range []struct {
		args   string
		status int
		want   string // of what is printed
	}{
		{"", 0, "sniff"},
		{"--help", 0, "Available Commands"},
		{"version", 0, "aetherctl "},
		{"version now", 2, `"now" is one argument too many (see 'aetherctl version --help')`},
		{"sniff", 2, "the name of a capture file is missing (see 'aetherctl sniff --help')"},
		{"sniff -o yaml x", 2, "the formats are text and json"},
		{"sniff --nope x", 2, "unknown flag: --nope (see 'aetherctl sniff --help')"},
		{"snif x", 1, `unknown command "snif"`},
	} {
		status, out, errs := aetherctl(t, "", strings.Fields(tt.args)...)
		if status != tt.status || !strings.Contains(out+errs, tt.want) {
			t.Errorf("%q: status %d, want %d with %q; printed:\n%s%s", tt.args, status, tt.status, tt.want, out, errs)
		}
	}
	for _, c := range commands() {
		if c.Short == "" || strings.HasSuffix(c.Short, ".") || len(c.Short) > 70 {
			t.Errorf("%s: short help %q", c.Name(), c.Short)
		}
	}
}
