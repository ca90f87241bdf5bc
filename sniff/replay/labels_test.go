package replay

import (
	"bufio"
	"cmp"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"aether/sniff"
)

// label is a row of labels.tsv: what tshark and other projects' own expectations say.
type label struct {
	file, client, server, class, sni, alpn, first string
	frame                                         int
	flags                                         []string
}

func (l *label) has(flag string) bool {
	for _, f := range l.flags {
		if f == flag {
			return true
		}
	}
	return false
}

func (l *label) looks() string {
	for _, f := range l.flags {
		if v, ok := strings.CutPrefix(f, "looks="); ok {
			return v
		}
	}
	return ""
}

func readLabels(t *testing.T, dir string) map[string][]label {
	t.Helper()
	f, err := os.Open(filepath.Join(dir, "labels.tsv"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rows := map[string][]label{}
	sc := bufio.NewScanner(f)
	for n := 1; sc.Scan(); n++ {
		c := strings.Split(sc.Text(), "\t")
		if n == 1 {
			continue
		}
		if len(c) != 13 {
			t.Fatalf("labels.tsv:%d: %d columns", n, len(c))
		}
		frame, err := strconv.Atoi(c[10])
		if err != nil {
			t.Fatalf("labels.tsv:%d: %v", n, err)
		}
		addr := func(ip, port string) string {
			return netip.AddrPortFrom(netip.MustParseAddr(ip), uint16(must(strconv.Atoi(port)))).String()
		}
		rows[c[0]] = append(rows[c[0]], label{
			file: c[0], client: addr(c[1], c[2]), server: addr(c[3], c[4]), class: c[5],
			sni: c[6], alpn: c[7], first: c[8], frame: frame, flags: strings.Split(c[12], ","),
		})
	}
	if err := sc.Err(); err != nil {
		t.Fatal(err)
	}
	return rows
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// excused are the rows that we read differently on purpose: file and first frame, and why.
var excused = map[string]string{
	"suricata-verify/drop-protocol-change.pcap:7": "its TCP header is 8 bytes long by its own data offset: that is no segment (RFC 9293 section 3.1)",
}

// TestLabels holds the flows of every capture against its labels. The captures
// beside the test are those that may be passed on; AETHER_PCAP_DIR names a folder with more.
func TestLabels(t *testing.T) {
	dir := cmp.Or(os.Getenv("AETHER_PCAP_DIR"), "testdata")
	labels := readLabels(t, dir)
	var files, rows, right, leftOut int
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.Contains(d.Name(), ".pcap") {
			return err
		}
		name, _ := filepath.Rel(dir, path)
		files++
		t.Run(name, func(t *testing.T) {
			flows := flowsOf(t, path)
			for _, l := range labels[name] {
				rows++
				at := fmt.Sprintf("%s:%d", name, l.frame)
				f, ok := flows[key(l.frame, l.client, l.server)]
				if why := excused[at]; why != "" {
					leftOut++
					if ok && said(&l, f) == l.said() {
						t.Errorf("%s is excused (%s) and agrees: take it off the list", at, why)
					}
					continue
				}
				if !ok {
					t.Errorf("%s: no flow %s > %s", at, l.client, l.server)
					continue
				}
				delete(flows, key(l.frame, l.client, l.server))
				if got, want := said(&l, f), l.said(); got != want {
					t.Errorf("%s: %s > %s (%s)\n got  %s\n want %s", at, l.client, l.server, strings.Join(l.flags, ","), got, want)
					continue
				}
				right++
			}
			for _, f := range flows {
				if f.ClientBytes+f.ServerBytes > 0 {
					t.Errorf("%s:%d: a flow with no label: %+v", name, f.Frame, f)
				}
			}
		})
		delete(labels, name)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for name := range labels {
		t.Errorf("%s is labelled and is not there", name)
	}
	if files == 0 || rows == 0 {
		t.Errorf("%d files, %d rows in %s", files, rows, dir)
	}
	t.Logf("%s: %d files, %d connections, %d as labelled, %d excused", dir, files, rows, right, leftOut)
}

func key(frame int, client, server string) string {
	return fmt.Sprintf("%d %s %s", frame, client, server)
}

func flowsOf(t *testing.T, path string) map[string]Flow {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	flows := map[string]Flow{}
	for fl, err := range Flows(f) {
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		flows[key(fl.Frame, fl.Client.String(), fl.Server.String())] = fl
	}
	return flows
}

// said puts a flow in the words of the labels, said of a label what of it can be seen in a capture.
func said(l *label, f Flow) string {
	class := f.Proto.String()
	if f.Midstream {
		class = "midstream"
	}
	switch l.class {
	case "unseen": // "nothing can be tested on such a row except that the reader survives"
		if f.Proto != sniff.None || !f.Incomplete {
			return "seen: " + class
		}
		return "unseen"
	case "midstream":
		class += "/" + f.Proto.String()
		if f.Incomplete {
			class = "midstream/incomplete"
		}
	}
	alpn := cmp.Or(strings.Join(f.ALPN, ","), "-")
	return fmt.Sprintf("%s sni=%s alpn=%s first=%s", class, cmp.Or(f.SNI, "-"), alpn, f.First)
}

func (l *label) said() string {
	class := l.class
	switch {
	case class == "unseen":
		return "unseen"
	case class == "midstream":
		class += "/" + map[string]string{"nothing": "none", "http-prefix": "incomplete"}[l.looks()]
		if strings.HasSuffix(class, "/") {
			class += l.looks()
		}
	case l.has("client-silent"):
		class = "none"
	}
	return fmt.Sprintf("%s sni=%s alpn=%s first=%s", class, l.sni, l.alpn, l.first)
}
