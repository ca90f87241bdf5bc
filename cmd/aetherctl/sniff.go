package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"aether/sniff/replay"
)

func sniffCommand() *cobra.Command {
	var output string
	var all bool
	c := &cobra.Command{
		Use:   "sniff FILE...",
		Short: "Show what the proxy takes the connections of a capture for",
		Long: `Put the TCP connections of packet captures (pcap or pcapng, also gzipped; - is
standard input) through the classifier that the proxy uses, and print one line each:

  FILE    as given
  FRAME   number of the connection's first frame
  CLIENT  who opened it, address and port
  SERVER  whom it was opened to
  CLASS   http/1.0, http/1.1, h2c, tls, opaque (anything else), none (the client
          sent nothing, or not enough of it is in the file)
  NAME    Host of the first HTTP/1 request, or SNI of the TLS ClientHello
  ALPN    offered by the ClientHello
  FIRST   who spoke first: client or server
  SENT    payload bytes of the client
  RECV    payload bytes of the server
  AFTER   bytes/segments of the client's that the answer took
  NOTES   midstream: the handshake is not in the file, so this is only what the
          first bytes look like; incomplete: bytes that would tell are not there

A value that is not there is "-". With -o json a line is an object with the same
names in lower case; new names may be added.`,
		Example: `  aetherctl sniff node.pcap
  tcpdump -i any -w - -c 1000 tcp | aetherctl sniff -
  aetherctl sniff -o json *.pcapng | jq 'select(.class == "opaque")'`,
		Args: atLeastOne("the name of a capture file"),
		RunE: func(c *cobra.Command, files []string) error {
			var p flowPrinter
			switch output {
			case "text":
				p = newTable(c.OutOrStdout())
			case "json":
				p = newLines(c.OutOrStdout())
			default:
				return usageError(c, fmt.Errorf("-o %s: the formats are text and json", output))
			}
			return sniffFiles(files, c.InOrStdin(), p, c.ErrOrStderr(), all)
		},
	}
	c.Flags().StringVarP(&output, "output", "o", "text", "format: text or json")
	c.Flags().BoolVarP(&all, "all", "a", false, "show connections without payload too")
	return c
}

// sniffFiles prints the flows of each file. What cannot be read is said on
// errs, where it happens, and the rest is still shown.
func sniffFiles(files []string, in io.Reader, p flowPrinter, errs io.Writer, all bool) error {
	bad := 0
	for _, name := range files {
		unread, err := sniffFile(name, in, p, all)
		if err = cmp.Or(err, p.flush()); err != nil {
			return err
		}
		if unread != nil {
			bad++
			fmt.Fprintf(errs, "aetherctl: %s: %v\n", name, unread)
		}
	}
	if bad > 0 {
		return &statusError{2, fmt.Errorf("%d of %d files could not be read, or only in part", bad, len(files))}
	}
	return nil
}

// sniffFile prints the flows of one file. unread is what is wrong with the
// file, err with the output.
func sniffFile(name string, in io.Reader, p flowPrinter, all bool) (unread, err error) {
	r := in
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return err.(*os.PathError).Err, nil
		}
		defer f.Close()
		r = f
	}
	for f, err := range replay.Flows(r) {
		if err != nil {
			return err, nil
		}
		if f.ClientBytes+f.ServerBytes == 0 && !f.Incomplete && !all {
			continue
		}
		if err := p.print(lineOf(name, f)); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

// flowLine is a line of output. The names are a promise to scripts.
type flowLine struct {
	File       string   `json:"file"`
	Frame      int      `json:"frame"`
	Client     string   `json:"client"`
	Server     string   `json:"server"`
	Class      string   `json:"class"`
	Name       string   `json:"name,omitempty"`
	ALPN       []string `json:"alpn,omitempty"`
	First      string   `json:"first,omitempty"`
	Sent       int64    `json:"sent"`
	Recv       int64    `json:"recv"`
	AfterBytes int      `json:"after_bytes"`
	AfterSegs  int      `json:"after_segments"`
	Notes      []string `json:"notes,omitempty"`
}

func lineOf(name string, f replay.Flow) flowLine {
	l := flowLine{
		File: name, Frame: f.Frame, Client: f.Client.String(), Server: f.Server.String(),
		Class: f.Proto.String(), Name: cmp.Or(f.Host, f.SNI), ALPN: f.ALPN,
		Sent: f.ClientBytes, Recv: f.ServerBytes, AfterBytes: f.AnswerBytes, AfterSegs: f.AnswerSegments,
	}
	if f.First != replay.Neither {
		l.First = f.First.String()
	}
	if f.Midstream {
		l.Notes = append(l.Notes, "midstream")
	}
	if f.Incomplete {
		l.Notes = append(l.Notes, "incomplete")
	}
	return l
}

// flowPrinter prints lines in some format; flush is called after each file.
type flowPrinter interface {
	print(flowLine) error
	flush() error
}

type jsonLines struct{ *json.Encoder }

func newLines(w io.Writer) jsonLines {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	return jsonLines{e}
}

func (j jsonLines) print(l flowLine) error { return j.Encode(l) }
func (j jsonLines) flush() error           { return nil }

// table aligns columns, file by file; the heading is printed once.
type table struct {
	w      *tabwriter.Writer
	headed bool
}

func newTable(w io.Writer) *table { return &table{w: tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)} }

func (t *table) print(l flowLine) error {
	if !t.headed {
		t.headed = true
		fmt.Fprintln(t.w, "FILE\tFRAME\tCLIENT\tSERVER\tCLASS\tNAME\tALPN\tFIRST\tSENT\tRECV\tAFTER\tNOTES")
	}
	after := ""
	if l.AfterBytes > 0 {
		after = fmt.Sprintf("%d/%d", l.AfterBytes, l.AfterSegs)
	}
	alpn := make([]string, len(l.ALPN))
	for i, n := range l.ALPN {
		alpn[i] = plain(n)
	}
	_, err := fmt.Fprintf(t.w, "%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%s\t%s\n",
		plain(l.File), l.Frame, l.Client, l.Server, l.Class, dash(plain(l.Name)), dash(strings.Join(alpn, ",")),
		dash(l.First), l.Sent, l.Recv, dash(after), dash(strings.Join(l.Notes, ",")))
	return err
}

func (t *table) flush() error { return t.w.Flush() }

func dash(s string) string { return cmp.Or(s, "-") }

// plain makes a value that came off the wire harmless for a terminal and one
// word for a script: bytes that are not visible ASCII, and %, become %xx.
func plain(s string) string {
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
