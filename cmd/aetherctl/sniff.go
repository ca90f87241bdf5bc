package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"aether/dataplane/admin"
	"aether/dataplane/model"
	"aether/sniff"
	"aether/sniff/replay"
)

func sniffCommand() *cobra.Command {
	var output, config, pod string
	var all bool
	var o meshFlags
	c := &cobra.Command{
		Use:   "sniff FILE...",
		Short: "Show what the proxy takes the connections of a capture for",
		Long: `Put the TCP connections and QUIC flows of packet captures (pcap or pcapng, also gzipped;
- is standard input) through the classifier that the proxy uses, and print one line each:

  FILE    as given
  FRAME   number of the connection's first frame
  NET     tcp or udp
  CLIENT  who opened it, address and port
  SERVER  whom it was opened to
  CLASS   http/1.0, http/1.1, h2c, tls, quic, opaque (anything else), none (the client
          sent nothing, or not enough of it is in the file)
  NAME    Host of the first HTTP/1 request, or SNI of the TLS ClientHello
  ALPN    offered by the ClientHello
  FIRST   who spoke first: client or server
  SENT    payload bytes of the client
  RECV    payload bytes of the server
  AFTER   bytes/segments of the client's that the answer took
  NOTES   midstream: the handshake is not in the file, so this is only what the
          first bytes look like; incomplete: bytes that would tell are not there; ech: the
          name may be the outer one of an encrypted ClientHello
  VERDICT with --explain: what the proxy would have done

A value that is not there is "-". UDP that is not QUIC, and connections without payload, are
shown with --all.

With --explain MESH (a directory of YAML, or a file such as 'aetherctl snapshot' prints)
the decision core says what the proxy would have done with each connection: the pod is the
one that has the client's address, or any of the ServiceAccount that --pod names, the rules
those of its node. Of HTTP that is the first request. It is judged as captured; dialled to 18081
on the loopback as on the proxy port; on 18008 as what the server's proxy makes of it.

With -o json a line is an object:

  file, frame, net, client, server, class, first, sent, recv   as above
  start                          time of the first frame (RFC 3339)
  name, alpn (list), ech (true)  of the request or ClientHello
  quic_version                   "0x00000001"
  after_bytes, after_segments    AFTER
  notes                          list
  explain                        with --explain: what 'aetherctl explain -o json' prints, or
                                 {"error": why it cannot be said}

What is empty is left out, but for numbers; new names may be added.

A file that is damaged or cut short gives the connections that it has, and a message that
names the frame and the byte where it ends; the exit status is then 2.`,
		Example: `  aetherctl sniff node.pcap
  tcpdump -i any -w - -c 1000 tcp | aetherctl sniff -
  aetherctl sniff -o json *.pcapng | jq 'select(.class == "opaque")'
  aetherctl snapshot > mesh.yaml; aetherctl sniff --explain mesh.yaml --pod shop/web web.pcap`,
		Args: atLeastOne("the name of a capture file"),
		RunE: func(c *cobra.Command, files []string) error {
			if err := checkOutput(c, output); err != nil {
				return err
			}
			s := sniffer{in: c.InOrStdin(), errs: c.ErrOrStderr(), all: all, progress: newProgress(c.ErrOrStderr(), time.Now)}
			out := s.progress.before(c.OutOrStdout())
			if output == "json" {
				s.print = func(l *flowLine) error { return jsonLine(out, l) }
				s.flush = func() error { return nil }
			} else {
				t := newTable(out, config != "")
				s.print, s.flush = t.print, t.flush
			}
			if config == "" {
				if only := cmp.Or(changed(c, "pod"), changed(c, "node"), changed(c, "mesh-domain"), changed(c, "trust-domain")); only != "" {
					return usageError(c, fmt.Errorf("--%s is for --explain", only))
				}
				return s.files(files)
			}
			m, err := openMesh(config, nothing{}, o, c.ErrOrStderr())
			if err != nil {
				return err
			}
			defer m.close()
			j := &judge{mesh: m}
			if pod != "" {
				ns, account, ok := strings.Cut(pod, "/")
				if !ok || ns == "" || account == "" || strings.Contains(account, "/") {
					return usageError(c, fmt.Errorf("--pod %s: want NAMESPACE/SERVICEACCOUNT", pod))
				}
				j.who = model.ServiceName{Namespace: ns, Name: account}
				if j.snap, err = m.of(j.who); err != nil {
					return err
				}
			}
			s.judge = j
			return s.files(files)
		},
	}
	outputFlag(c, &output)
	c.Flags().BoolVarP(&all, "all", "a", false, "show connections without payload, and UDP that is not QUIC, too")
	c.Flags().StringVar(&config, "explain", "", "say what the proxy would have done, by this configuration directory or snapshot file")
	c.Flags().StringVar(&pod, "pod", "", "with --explain: whose traffic it is, NAMESPACE/SERVICEACCOUNT; default: of the pod with the client's address")
	o.add(c, "with --explain: ")
	return c
}

// nothing is the standard input of a configuration when captures may come from there.
type nothing struct{}

func (nothing) Read([]byte) (int, error) {
	return 0, errors.New("standard input is for captures; name a file")
}

// sniffer prints the flows of captures.
type sniffer struct {
	in       io.Reader
	errs     io.Writer
	all      bool
	judge    *judge // nil: nobody asks
	progress *progress
	print    func(*flowLine) error
	flush    func() error // after each file
}

// files prints the flows of each file. What cannot be read is said where it happens, and
// the rest is still shown.
func (s *sniffer) files(names []string) error {
	bad := 0
	for _, name := range names {
		unread, err := s.file(name)
		s.progress.clear()
		if err = cmp.Or(err, s.flush()); err != nil {
			return err
		}
		if unread != nil {
			bad++
			for l := range strings.Lines(unread.Error()) {
				fmt.Fprintf(s.errs, "aetherctl: %s: %s\n", name, strings.TrimSuffix(l, "\n"))
			}
		}
	}
	if bad > 0 {
		return &statusError{2, fmt.Errorf("%d of %d files could not be read, or only in part", bad, len(names))}
	}
	return nil
}

// file prints the flows of one file. unread is what is wrong with the
// file, err with the output.
func (s *sniffer) file(name string) (unread, err error) {
	r, size := s.in, int64(0)
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return err.(*os.PathError).Err, nil
		}
		defer f.Close()
		r = f
		if info, err := f.Stat(); err == nil && info.Mode().IsRegular() {
			size = info.Size()
		}
	}
	var tally replay.Tally
	for f, err := range replay.Read(s.progress.of(name, r, size), replay.Options{Heads: s.judge != nil, Tally: &tally}) {
		if err != nil {
			return err, nil
		}
		if !s.all && (f.ClientBytes+f.ServerBytes == 0 && !f.Incomplete || f.Transport == replay.UDP && f.Proto != sniff.QUIC && !f.Incomplete) {
			continue
		}
		l := lineOf(name, &f)
		if s.judge != nil {
			l.Explain = s.judge.explain(&f)
		}
		if err := s.print(l); err != nil {
			return nil, err
		}
	}
	if tally.TCP == 0 {
		s.progress.clear()
		fmt.Fprintf(s.errs, "aetherctl: %s: no TCP in %d packets: %d of UDP (--all shows them), %d fragments of IP, %d others or unreadable; VXLAN, GRE and IP in IP are looked into\n",
			name, tally.Frames, tally.UDP, tally.Fragments, tally.Other)
	}
	return nil, nil
}

// flowLine is a line of output. The names are a promise to scripts.
type flowLine struct {
	File       string     `json:"file"`
	Frame      int        `json:"frame"`
	Start      *time.Time `json:"start,omitempty"`
	Net        string     `json:"net"`
	Client     string     `json:"client"`
	Server     string     `json:"server"`
	Class      string     `json:"class"`
	Version    string     `json:"quic_version,omitempty"`
	Name       string     `json:"name,omitempty"`
	ALPN       []string   `json:"alpn,omitempty"`
	ECH        bool       `json:"ech,omitempty"`
	First      string     `json:"first,omitempty"`
	Sent       int64      `json:"sent"`
	Recv       int64      `json:"recv"`
	AfterBytes int        `json:"after_bytes"`
	AfterSegs  int        `json:"after_segments"`
	Notes      []string   `json:"notes,omitempty"`
	Explain    *judgement `json:"explain,omitempty"`
}

func lineOf(name string, f *replay.Flow) *flowLine {
	l := &flowLine{
		File: name, Frame: f.Frame, Net: f.Transport.String(), Client: f.Client.String(), Server: f.Server.String(),
		Class: f.Proto.String(), Name: cmp.Or(f.Host, f.SNI), ALPN: f.ALPN, ECH: f.ECH,
		Sent: f.ClientBytes, Recv: f.ServerBytes, AfterBytes: f.AnswerBytes, AfterSegs: f.AnswerSegments,
	}
	if !f.Start.IsZero() {
		l.Start = &f.Start
	}
	if f.Version != 0 {
		l.Version = fmt.Sprintf("%#08x", f.Version)
	}
	if f.First != replay.Neither {
		l.First = f.First.String()
	}
	for _, n := range []struct {
		on   bool
		note string
	}{{f.Midstream, "midstream"}, {f.Incomplete, "incomplete"}, {f.ECH, "ech"}} {
		if n.on {
			l.Notes = append(l.Notes, n.note)
		}
	}
	return l
}

// judgement is what the proxy would have done with a flow, or why that cannot be said.
type judgement struct {
	*admin.Explanation
	Error string `json:"error,omitempty"`
}

// tableRows is how many rows are aligned with each other: so many are held in memory.
const tableRows = 1000

// table aligns columns; the heading is printed once.
type table struct {
	w        *tabwriter.Writer
	verdicts bool
	rows     int
}

func newTable(w io.Writer, verdicts bool) *table {
	return &table{w: tabwriter.NewWriter(w, 0, 0, 2, ' ', 0), verdicts: verdicts}
}

func (t *table) print(l *flowLine) error {
	if t.rows == 0 {
		fmt.Fprint(t.w, "FILE\tFRAME\tNET\tCLIENT\tSERVER\tCLASS\tNAME\tALPN\tFIRST\tSENT\tRECV\tAFTER\tNOTES")
		if t.verdicts {
			fmt.Fprint(t.w, "\tVERDICT")
		}
		fmt.Fprintln(t.w)
	}
	after := ""
	if l.AfterBytes > 0 {
		after = fmt.Sprintf("%d/%d", l.AfterBytes, l.AfterSegs)
	}
	alpn := make([]string, len(l.ALPN))
	for i, n := range l.ALPN {
		alpn[i] = oneWord(n)
	}
	_, err := fmt.Fprintf(t.w, "%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%s\t%s",
		oneWord(l.File), l.Frame, l.Net, l.Client, l.Server, l.Class, dash(oneWord(l.Name)), dash(strings.Join(alpn, ",")),
		dash(l.First), l.Sent, l.Recv, dash(after), dash(strings.Join(l.Notes, ",")))
	if e := l.Explain; err == nil && e != nil {
		verdict := "- (" + e.Error + ")"
		switch {
		case e.Explanation != nil && e.Error != "":
			verdict = e.Verdict + ", but " + e.Error
		case e.Explanation != nil:
			verdict = e.Verdict
		}
		_, err = fmt.Fprintf(t.w, "\t%s", verdict)
	}
	if err == nil {
		_, err = fmt.Fprintln(t.w)
	}
	if t.rows++; err == nil && t.rows%tableRows == 0 {
		err = t.flush()
	}
	return err
}

func (t *table) flush() error { return t.w.Flush() }

func dash(s string) string { return cmp.Or(s, "-") }

// oneWord makes a value that came off the wire harmless for a terminal and one
// word for a script: bytes that are not visible ASCII, and %, become %xx.
func oneWord(s string) string {
	var b strings.Builder
	for _, c := range []byte(s) {
		if c <= ' ' || c >= 0x7f || c == '%' {
			fmt.Fprintf(&b, "%%%02x", c)
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}
