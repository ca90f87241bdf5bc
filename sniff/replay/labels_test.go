package replay

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"aether/e2e/counts"
	"aether/sniff"
)

// label is a row of labels.tsv or labels-quic.tsv: what tshark and other projects' own
// expectations say.
type label struct {
	transport                                              Transport
	file, client, server, class, sni, alpn, first, version string
	frame                                                  int
	flags                                                  []string
}

func (l *label) has(flag string) bool { return slices.Contains(l.flags, flag) }

func (l *label) looks() string {
	for _, f := range l.flags {
		if v, ok := strings.CutPrefix(f, "looks="); ok {
			return v
		}
	}
	return ""
}

// readLabels reads both tables of dir, by file.
func readLabels(t *testing.T, dir string) map[string][]label {
	t.Helper()
	rows := map[string][]label{}
	for _, table := range []struct {
		name      string
		columns   int
		transport Transport
	}{{"labels.tsv", 13, TCP}, {"labels-quic.tsv", 14, UDP}} {
		b, err := os.ReadFile(filepath.Join(dir, table.name))
		if err != nil {
			t.Fatal(err)
		}
		for n, line := range strings.Split(strings.TrimSuffix(string(b), "\n"), "\n") {
			c := strings.Split(line, "\t")
			if len(c) != table.columns {
				t.Fatalf("%s:%d: %d columns", table.name, n+1, len(c))
			}
			if n == 0 {
				continue
			}
			l := label{
				transport: table.transport, file: c[0], client: address(c[1], c[2]), server: address(c[3], c[4]), class: c[5],
				sni: c[6], alpn: c[7], first: c[8], frame: must(strconv.Atoi(c[10])), flags: strings.Split(c[12], ","), version: "-",
			}
			if table.transport == UDP {
				l.version = c[13]
			}
			rows[l.file] = append(rows[l.file], l)
		}
	}
	return rows
}

func address(ip, port string) string {
	return netip.AddrPortFrom(netip.MustParseAddr(ip), uint16(must(strconv.Atoi(port)))).String()
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
	type count struct{ rows, right, excused int }
	classes := map[string]*count{}
	files := 0
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.Contains(d.Name(), ".pcap") {
			return err
		}
		name, _ := filepath.Rel(dir, path)
		files++
		t.Run(name, func(t *testing.T) {
			flows := flowsOf(t, path)
			udp := false // UDP is labelled in the files that are there for it
			for _, l := range labels[name] {
				udp = udp || l.transport == UDP
				n := classes[l.transport.String()+" "+l.class]
				if n == nil {
					n = &count{}
					classes[l.transport.String()+" "+l.class] = n
				}
				n.rows++
				at := fmt.Sprintf("%s:%d", name, l.frame)
				id := labelKey(l.transport, l.frame, l.client, l.server)
				f, ok := flows[id]
				if why := excused[at]; why != "" {
					n.excused++
					t.Logf("%s is excused: %s", at, why)
					if ok && said(&l, f) == l.said() {
						t.Errorf("%s is excused and agrees: take it off the list", at)
					}
					continue
				}
				if !ok {
					t.Errorf("%s: no flow %s > %s", at, l.client, l.server)
					continue
				}
				delete(flows, id)
				if got, want := said(&l, f), l.said(); got != want {
					t.Errorf("%s: %s > %s (%s)\n got  %s\n want %s", at, l.client, l.server, strings.Join(l.flags, ","), got, want)
					continue
				}
				n.right++
			}
			for _, f := range flows {
				if f.ClientBytes+f.ServerBytes > 0 && (f.Transport == TCP || udp) {
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
	var all count
	for _, class := range slices.Sorted(maps.Keys(classes)) {
		n := classes[class]
		t.Logf("%-15s %3d rows, %3d as labelled, %d excused", class, n.rows, n.right, n.excused)
		all = count{all.rows + n.rows, all.right + n.right, all.excused + n.excused}
	}
	counts.Say(t, "%d captures, %d flows, %d as labelled, %d excused", files, all.rows, all.right, all.excused)
	if files == 0 || all.rows == 0 {
		t.Errorf("no captures in %s", dir)
	}
}

func labelKey(tr Transport, frame int, client, server string) string {
	return fmt.Sprintf("%s %d %s %s", tr, frame, client, server)
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
		flows[labelKey(fl.Transport, fl.Frame, fl.Client.String(), fl.Server.String())] = fl
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
	version := "-"
	if f.Version != 0 {
		version = fmt.Sprintf("%#08x", f.Version)
	}
	alpn := cmp.Or(strings.Join(f.ALPN, ","), "-")
	return fmt.Sprintf("%s sni=%s alpn=%s first=%s version=%s", class, cmp.Or(f.SNI, "-"), alpn, f.First, version)
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
	return fmt.Sprintf("%s sni=%s alpn=%s first=%s version=%s", class, l.sni, l.alpn, l.first, l.version)
}
