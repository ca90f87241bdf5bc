package main

import (
	"bytes"
	"compress/gzip"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
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

const heading = "FILE FRAME NET CLIENT SERVER CLASS NAME ALPN FIRST SENT RECV AFTER NOTES"

func TestSniffText(t *testing.T) {
	file := captures + "arkime/tls-split-client-hello.pcap"
	status, out, errs := aetherctl(t, "", "sniff", file)
	want := []string{heading, file + " 1 tcp 10.1.17.215:49927 142.250.114.100:443 tls clients2.google.com h2,http/1.1 client 2521 10151 1729/2 ech"}
	if got := fields(out); status != 0 || errs != "" || strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("status %d, errors %q\n%s\nwant\n%s", status, errs, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	for i, l := range fields(out) {
		if n := len(strings.Fields(l)); n != 13 {
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
	if rows := fields(out); len(rows) != 2 || !strings.HasPrefix(rows[1], good+" 1 tcp 10.1.1.2:44644 10.1.1.1:80 http/1.1 ") {
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

// TestSniffCut: a file that ends in the middle gives the flows it has, and the frame and the byte
// where it ends; packed or not, from a file or from standard input.
func TestSniffCut(t *testing.T) {
	whole := newCapture().flow("10.1.1.7", "10.96.0.10:8080", "GET / HTTP/1.1\r\nHost: cart\r\n\r\n", "").
		flow("10.1.1.7", "10.96.0.10:9000", "SSH-2.0-x\r\n", "").b.Bytes()
	cut := whole[:len(whole)-5]
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	z.Write(cut)
	z.Close()
	for name, in := range map[string][]byte{"plain": cut, "packed": packed.Bytes()} {
		status, out, errs := aetherctl(t, string(in), "sniff", "-")
		want := fmt.Sprintf("aetherctl: -: frame 8, at byte %d: the file ends in the middle of this frame; it was cut short when it was written or copied\n", len(whole)-16-51)
		if rows := fields(out); status != 2 || len(rows) != 2 || !strings.Contains(rows[1], " http/1.1 cart ") || !strings.HasPrefix(errs, want) {
			t.Errorf("%s: status %d\n%s%swant %s", name, status, out, errs, want)
		}
	}
}

func TestSniffQUIC(t *testing.T) {
	file := captures + "zeek/quic_quicv2-http3-443.pcap"
	status, out, _ := aetherctl(t, "", "sniff", "-o", "json", file)
	var l flowLine
	if err := json.Unmarshal([]byte(out), &l); err != nil || status != 0 {
		t.Fatalf("status %d, %v: %s", status, err, out)
	}
	if l.Net != "udp" || l.Class != "quic" || l.Version != "0x6b3343cf" || strings.Join(l.ALPN, ",") != "h3" || l.Start == nil || l.Start.Year() < 2000 {
		t.Errorf("%+v", l)
	}
	dns := newCapture().udp("10.1.1.7:5000", "10.96.0.2:53", "\x12\x34\x01\x00\x00\x01\x00\x00").b.String()
	if _, out, _ := aetherctl(t, dns, "sniff", "-"); out != "" {
		t.Errorf("UDP that is not QUIC: %s", out)
	}
	if _, out, _ := aetherctl(t, dns, "sniff", "--all", "-"); !strings.Contains(strings.Join(fields(out), "\n"), "- 1 udp 10.1.1.7:5000 10.96.0.2:53 opaque ") {
		t.Errorf("with --all: %s", out)
	}
}

// TestSniffNames: the names of the JSON are those of the help, and the other way round.
func TestSniffNames(t *testing.T) {
	_, help, _ := aetherctl(t, "", "sniff", "--help")
	b, err := json.Marshal(flowLine{Start: &time.Time{}, Version: "1", Name: "n", ALPN: []string{"a"}, ECH: true, First: "f", Notes: []string{"n"}, Explain: &judgement{Error: "e"}})
	if err != nil {
		t.Fatal(err)
	}
	var names map[string]any
	if err := json.Unmarshal(b, &names); err != nil {
		t.Fatal(err)
	}
	_, help, _ = strings.Cut(help, "With -o json")
	for name := range names {
		if !regexp.MustCompile(`\b` + name + `\b`).MatchString(help) {
			t.Errorf("%s is not in the help", name)
		}
	}
}

// h2 is a connection's first request over HTTP/2: the preface, SETTINGS, and HEADERS with GET http://cart/
// (RFC 7541 appendix A: :method, :scheme and :path by their indices, :authority as a literal).
const h2 = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" +
	"\x00\x00\x00\x04\x00\x00\x00\x00\x00" +
	"\x00\x00\x09\x01\x05\x00\x00\x00\x01" + "\x82\x86\x84\x41\x04cart"

// TestSniffExplain: what the proxy would have done, for each flow of a capture.
func TestSniffExplain(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "shop.yaml"), []byte(shop), 0o644); err != nil {
		t.Fatal(err)
	}
	request := func(host string) string { return "GET /items HTTP/1.1\r\nHost: " + host + "\r\n\r\n" }
	const web, other, cart = "10.1.1.10", "10.9.9.9", "10.96.0.10"
	for _, tt := range []struct {
		name, pod, client, server, says, answer, want string
	}{
		{"a request", "", web, cart + ":8080", request("cart"), "HTTP/1.1 200 OK\r\n", "forward shop/cart:8080 (declared-http Service shop/cart)"},
		{"the wrong port", "", web, cart + ":8080", request("cart:9090"), "", "refuse 421 (port-mismatch Service shop/cart)"},
		{"a port that is not there", "", web, cart + ":9090", request("cart"), "", "refuse 421 (port-not-declared Service shop/cart)"},
		{"raw TCP", "", web, cart + ":9000", "\x00\x00\x00\x08", "", "forward shop/cart:9000 (declared-tcp Service shop/cart)"},
		{"server first", "", web, "192.0.2.1:25", "", "220 mail\r\n", "passthrough (server-first)"},
		{"foreign", "", web, "192.0.2.1:80", request("example.org"), "", "passthrough (not-mesh)"},
		{"h2c", "", web, cart + ":8080", h2, "", "forward shop/cart:8080 (declared-http Service shop/cart)"},
		{"proxy port", "shop/web", "127.0.0.1", "127.0.0.1:18081", request("cart:8080"), "", "forward shop/cart:8080 (declared-http Service shop/cart)"},
		{"proxy port, no port", "shop/web", "127.0.0.1", "127.0.0.1:18081", request("cart"), "", "refuse 421 (port-required Service shop/cart)"},
		{"no pod's", "", other, cart + ":8080", request("cart"), "", "- (no pod of the mesh has the address 10.9.9.9: say whose traffic it is with --pod)"},
		{"no pod's, and said", "shop/web", other, cart + ":8080", request("cart"), "", "forward shop/cart:8080 (declared-http Service shop/cart)"},
		{"a bad request", "", web, cart + ":8080", "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "",
			"serve (declared-http Service shop/cart), but where it serves the request it answers 400: http1: several Host fields: send one (RFC 9112 3.2)"},
		{"half a request", "", web, cart + ":8080", "GET / HTTP/1.1\r\nHost: a\r\nAcc", "", "serve (declared-http Service shop/cart), but the head of the first request is not whole in the file"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			args := []string{"sniff", "--explain", dir, "-"}
			if tt.pod != "" {
				args = append(args, "--pod", tt.pod)
			}
			in := newCapture().flow(tt.client, tt.server, tt.says, tt.answer).b.String()
			status, out, errs := aetherctl(t, in, args...)
			rows := fields(out)
			if status != 0 || errs != "" || len(rows) != 2 || rows[0] != heading+" VERDICT" {
				t.Fatalf("status %d\n%s%s", status, out, errs)
			}
			if got := strings.SplitN(rows[1], " ", 14); len(got) != 14 || got[13] != tt.want {
				t.Errorf("got  %s\nwant %s", got[len(got)-1], tt.want)
			}
			_, out, _ = aetherctl(t, in, append(args, "-o", "json")...)
			var l flowLine
			if err := json.Unmarshal([]byte(out), &l); err != nil || l.Explain == nil || l.Explain.Explanation != nil && len(l.Explain.Steps) == 0 {
				t.Fatalf("%v %s", err, out)
			}
			if l.Explain.Error != "" {
				return
			}
			// What it says can be asked again.
			explain := []string{"explain", "--config", dir, l.Explain.Flow}
			if l.Explain.Request != "" {
				explain = append(explain, l.Explain.Request)
			}
			if status, again, errs := aetherctl(t, "", explain...); status != 0 || !strings.HasPrefix(again, l.Explain.Verdict+"\n") {
				t.Errorf("asked again, status %d: %s%s", status, again, errs)
			}
		})
	}
}

// TestSniffHop: what is sent to a pod's mTLS port is judged at that pod.
func TestSniffHop(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "shop.yaml"), []byte(shop), 0o644); err != nil {
		t.Fatal(err)
	}
	for sni, want := range map[string]string{
		"8080": "deliver 8080 http http1 (served-port Pod shop/cart-1)",
		"7070": "refuse (unknown-sni Pod shop/cart-1)",
		"":     "- (a connection to the mTLS port whose server name is no port)",
	} {
		ours, theirs := net.Pipe()
		var client sync.WaitGroup
		client.Go(func() {
			_ = tls.Client(ours, &tls.Config{ServerName: sni, InsecureSkipVerify: true}).Handshake()
		})
		hello := make([]byte, 4096)
		n, err := theirs.Read(hello)
		theirs.Close()
		client.Wait()
		if err != nil {
			t.Fatal(err)
		}
		in := newCapture().flow("10.1.1.10", "10.1.2.10:18008", string(hello[:n]), "").b.String()
		if _, out, errs := aetherctl(t, in, "sniff", "--explain", dir, "-"); !strings.HasSuffix(strings.Join(fields(out), "\n"), " "+want) {
			t.Errorf("%q: want %s\n%s%s", sni, want, out, errs)
		}
	}
}

// TestProgress: silent for a second, then how far it is, and gone before anything else is printed.
func TestProgress(t *testing.T) {
	var term, out bytes.Buffer
	now := time.Unix(0, 0)
	p := &progress{w: &term, now: func() time.Time { return now }}
	r := p.of("big.pcap", strings.NewReader(strings.Repeat("x", 4_000_000)), 4_000_000)
	read := func(n int, took time.Duration) string {
		t.Helper()
		now = now.Add(took)
		if _, err := io.ReadFull(r, make([]byte, n)); err != nil {
			t.Fatal(err)
		}
		s := term.String()
		term.Reset()
		return s
	}
	for i, tt := range []struct {
		n    int
		took time.Duration
		want string
	}{
		{500_000, 900 * time.Millisecond, ""},
		{500_000, 1100 * time.Millisecond, clearLine + "big.pcap: 1 of 4 MB, 25 %, 6s left"},
		{500_000, 100 * time.Millisecond, ""},
		{1_500_000, 400 * time.Millisecond, clearLine + "big.pcap: 3 of 4 MB, 75 %, 1s left"},
	} {
		if got := read(tt.n, tt.took); got != tt.want {
			t.Errorf("%d: %q, want %q", i, got, tt.want)
		}
	}
	fmt.Fprint(p.before(&out), "row\n")
	if term.String() != clearLine || out.String() != "row\n" {
		t.Errorf("%q, %q", term.String(), out.String())
	}
	if p := newProgress(&term, time.Now); p.of("x", r, 1) != r {
		t.Error("progress where no terminal is")
	}
	tty, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer tty.Close()
	if p := newProgress(tty, time.Now); p.w != tty {
		t.Error("no progress on a terminal")
	}
}

// TestTableRows: a table of any length is printed in pieces.
func TestTableRows(t *testing.T) {
	var b bytes.Buffer
	tab := newTable(&b, false)
	for i := range tableRows {
		if err := tab.print(&flowLine{File: "f", Frame: i + 1}); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(fields(b.String())); n != tableRows+1 {
		t.Errorf("%d lines printed before the end, want %d", n, tableRows+1)
	}
}

func TestPlain(t *testing.T) {
	for in, want := range map[string]string{
		"cart:8080": "cart:8080", "\x1b[31m": "%1b[31m", "a b\tc": "a%20b%09c", "100%": "100%25", "é": "%c3%a9", "": "",
	} {
		if got := oneWord(in); got != want {
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
		{"sniff -o yaml x", 2, "the formats are text and json (see 'aetherctl sniff --help')"},
		{"sniff --pod shop/web x", 2, "--pod is for --explain"},
		{"sniff --node n1 x", 2, "--node is for --explain"},
		{"sniff --explain nowhere x", 1, "configuration nowhere: no such file or directory"},
		{"sniff --explain - -", 1, "standard input is for captures; name a file"},
		{"explain", 2, "one FLOW and at most one REQUEST"},
		{"explain -o xml a", 2, "the formats are text and json (see 'aetherctl explain --help')"},
		{"explain nonsense", 2, "the form is: namespace/account[@container] > address:port|proxy"},
		{"why -o xml", 2, "the formats are text and json (see 'aetherctl why --help')"},
		{"why -n 0", 2, `-n: "0" is no positive number (see 'aetherctl why --help')`},
		{"why -n x", 2, `invalid argument "x"`},
		{"why --pod web", 2, `--pod: "web" is not namespace/name, with a pod's name or its ServiceAccount's after the slash`},
		{"why --service a/b/c", 2, `--service: "a/b/c" is not namespace/name`},
		{"why --reason port-mismach", 2, `--reason: there is no "port-mismach"; the reasons are `},
		{"why all", 2, `"all" is one argument too many`},
		{"sniff --nope x", 2, "unknown flag: --nope (see 'aetherctl sniff --help')"},
		{"snif x", 2, `unknown command "snif"`},
		{"statsu", 2, `unknown command "statsu"`},
	} {
		status, out, errs := aetherctl(t, "", strings.Fields(tt.args)...)
		if status != tt.status || !strings.Contains(out+errs, tt.want) {
			t.Errorf("%q: status %d, want %d with %q; printed:\n%s%s", tt.args, status, tt.status, tt.want, out, errs)
		}
	}
	for _, c := range commands() {
		if c.HasAvailableFlags() && c.Name() != "demo" && c.Example == "" {
			t.Errorf("%s: no example", c.Name())
		}
		if c.Short == "" || strings.HasSuffix(c.Short, ".") || len(c.Short) > 70 {
			t.Errorf("%s: short help %q", c.Name(), c.Short)
		}
	}
}

// TestSniffWithoutTCP: a capture of which nothing can be shown is told of, with what was in it.
func TestSniffWithoutTCP(t *testing.T) {
	udp := append([]byte{0x9c, 0x40, 0, 53, 0, 12, 0, 0}, "dns?"...)
	p := append([]byte{0x45, 0, 0, 32, 0, 1, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2}, udp...)
	file := "\xd4\xc3\xb2\xa1\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\x00\x00\x65\x00\x00\x00" +
		"\x01\x00\x00\x00\x00\x00\x00\x00\x20\x00\x00\x00\x20\x00\x00\x00" + string(p)
	status, out, errs := aetherctl(t, file, "sniff", "-")
	if status != 0 || out != "" || !strings.Contains(errs, "no TCP in 1 packets: 1 of UDP") {
		t.Errorf("status %d, out %q, errors %q", status, out, errs)
	}
}
