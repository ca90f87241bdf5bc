package sniff

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/base64"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"aether/e2e/testseed"
)

// testdata is where the extracted captures are: those that may be passed on, or
// more of them in a folder that AETHER_STREAMS names.
func testdata(t testing.TB, file string) (rows [][]string) {
	t.Helper()
	f, err := os.Open(filepath.Join(cmp.Or(os.Getenv("AETHER_STREAMS"), "testdata"), file))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	sc := bufio.NewScanner(f)
	sc.Buffer(nil, 1<<20)
	columns := 0
	for n := 1; sc.Scan(); n++ {
		c := strings.Split(sc.Text(), "\t")
		if n == 1 {
			columns = len(c)
			continue
		}
		if len(c) != columns {
			t.Fatalf("%s:%d: %d columns, want %d", file, n, len(c), columns)
		}
		rows = append(rows, c)
	}
	if err := sc.Err(); err != nil {
		t.Fatal(err)
	}
	if len(rows) == 0 {
		t.Fatalf("%s is empty", file)
	}
	return rows
}

func decode64(t testing.TB, s string) []byte {
	t.Helper()
	b, err := base64.StdEncoding.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// numbersOf writes groups and versions as the tables do.
func numbersOf(l []uint16) string {
	var s []string
	for _, v := range l {
		s = append(s, fmt.Sprintf("%04x", v))
	}
	return cmp.Or(strings.Join(s, ","), "-")
}

// columns writes a hello as the tables do: sni, alpn, ech, shares, versions.
func columns(h Hello) []string {
	var alpn []string
	for n := range h.ALPN.All() {
		alpn = append(alpn, string(n))
	}
	ech := "-"
	if h.ECH {
		ech = "ech"
	}
	return []string{cmp.Or(string(h.SNI), "-"), cmp.Or(strings.Join(alpn, ","), "-"), ech, numbersOf(h.KeyShares), numbersOf(h.Versions)}
}

// excused are the cells that tshark reads differently, and why.
var excused = map[string]string{
	"zeek/tls_tls-13draft19-early-data.pcap:1 shares":  "key_share had the number 40 up to draft 22 of TLS 1.3, which no RFC gives it",
	"zeek/tls_tls-13draft19-early-data.pcap:22 shares": "likewise",
	"ndpi/no_sni.pcap:36 shares":                       "tshark counts the share inside the ESNI extension",
	"ndpi/no_sni.pcap:224 shares":                      "likewise",
	"ndpi/no_sni.pcap:225 shares":                      "likewise",
	"ndpi/no_sni.pcap:226 shares":                      "likewise",
	"ndpi/tls_esni_sni_both.pcap:1 shares":             "likewise",
	"ndpi/tls_esni_sni_both.pcap:21 shares":            "likewise",
}

// agrees compares a hello with the columns of a table, "?" for what they do not know.
func agrees(t *testing.T, name string, h Hello, want []string) {
	t.Helper()
	t.Helper()
	for i, got := range columns(h) {
		cell := name + " " + []string{"sni", "alpn", "ech", "shares", "versions"}[i]
		if why := excused[cell]; (why == "") == (got != want[i]) && want[i] != "?" {
			t.Errorf("%s: %q, want %q (excused: %q)", cell, got, want[i], why)
		}
	}
}

// TestStreams holds the clients' streams of the captures against the labels, and against
// themselves in every segmentation.
func TestStreams(t *testing.T) {
	random := testseed.Rand(t)
	rows := testdata(t, "streams.tsv")
	classes := map[string]int{}
	splits := 0
	for _, row := range rows {
		b := decode64(t, row[7])
		class, cut := strings.CutSuffix(row[1], "+")
		classes[class]++
		var s State
		r, last := s.Detect(b), s.Last(b)
		if last.Proto.String() != class || !r.More && show(r) != show(last) {
			t.Errorf("%s: %s and last %s, want %s", row[0], show(r), show(last), class)
			continue
		}
		if cut != (r.More && class == "tls") {
			t.Errorf("%s: %s of a stream marked %s", row[0], show(r), row[1])
		}
		agrees(t, row[0], last.Hello, row[2:7])
		splits += everySplit(t, row[0], b, random)
	}
	t.Logf("%d streams %v, %d ways to split them", len(rows), classes, splits)
}

// TestSplitsByHand is the same for streams that the captures do not have.
func TestSplitsByHand(t *testing.T) {
	random := testseed.Rand(t)
	for _, tt := range textCases {
		everySplit(t, tt.in, []byte(tt.in), random)
	}
	for _, tt := range helloCases() {
		everySplit(t, tt.name, tt.in, random)
		if len(tt.in) > recordHeader {
			for _, n := range []int{1, 2, 500} {
				everySplit(t, fmt.Sprintf("%s in records of %d", tt.name, n), records(tt.in[recordHeader:], n), random)
			}
		}
	}
	for name, c := range configs() {
		b := clientHelloOf(t, c)
		everySplit(t, name, b, random)
		for _, n := range []int{1, 2, 500} { // case 95
			everySplit(t, fmt.Sprintf("%s in records of %d", name, n), records(b[recordHeader:], n), random)
		}
	}
	everySplit(t, "head", head300, random)
}

// everySplit checks that the answer about b does not depend on how it was cut into
// segments, and returns how many ways it went through.
//
// Within the first 64 bytes that is all 2^63 of them: a State that has seen i bytes
// and then j is equal to one that has seen j at once, for every i < j; so by induction it
// is the same after j bytes whatever cuts were before, and with it everything that
// follows. Beyond, and over both together, cuts are drawn at random.
func everySplit(t *testing.T, name string, b []byte, random *rand.Rand) (ways int) {
	t.Helper()
	feed := func(s *State, n int) { s.RequestHost(b[:n:n]); s.Detect(b[:n:n]) }
	look := func(s *State, n int) string {
		host, more, ok := s.RequestHost(b[:n:n])
		r := s.Detect(b[:n:n])
		return fmt.Sprint(r.Proto, r.More, columns(r.Hello), string(host), more, ok)
	}
	var whole State
	want := look(&whole, len(b))
	var seen [65]State // at once, up to each of the first bytes
	for j := range min(len(b), 64) + 1 {
		feed(&seen[j], j)
		for i := range j {
			s := seen[i]
			if feed(&s, j); s != seen[j] {
				t.Fatalf("%.60q: after %d bytes it matters that there was a cut at %d:\n%+v\n%+v", name, j, i, seen[j], s)
			}
			ways++
		}
		s := seen[j]
		if got := look(&s, len(b)); got != want || s != whole {
			t.Fatalf("%.60q: cut at %d\ngot  %s\nwant %s", name, j, got, want)
		}
		ways++
	}
	for range 40 {
		var s State
		var cuts []int
		for at := 0; at < len(b); {
			at = min(len(b), at+1+random.IntN(1+random.IntN(len(b))))
			cuts = append(cuts, at)
			feed(&s, at)
		}
		if got := look(&s, len(b)); got != want || s != whole {
			t.Fatalf("%.60q: cut at %v\ngot  %s\nwant %s", name, cuts, got, want)
		}
		ways++
	}
	final := ""
	var s State
	for i := range min(len(b), 2048) + 1 { // and an answer, once given, stays
		if _, more, _ := s.RequestHost(b[:i]); more || s.Detect(b[:i]).More {
			continue
		}
		got := look(&s, i)
		if final != "" && final != got {
			t.Fatalf("%.60q: %s was final, %s after %d bytes", name, final, got, i)
		}
		final = got
	}
	return ways + 1
}

// TestSplitSlicesMove: the State keeps no slice of a buffer that has moved.
func TestSplitSlicesMove(t *testing.T) {
	b := clientHello13(t, "cart.shop.example", []string{"h2", "http/1.1"})
	var s State
	for i := range b {
		old := bytes.Clone(b[:i])
		s.Detect(old)
		clear(old)
	}
	if got, want := fmt.Sprint(columns(s.Detect(b).Hello)), fmt.Sprint(columns(Detect(b).Hello)); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
