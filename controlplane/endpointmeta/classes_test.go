package endpointmeta

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"aether/dataplane/model"
	"aether/e2e/testseed"
)

// Contract 1.3: the majority of rows; a tie goes to HTTP before TCP; no order of rows
// matters; one answer a port.
func TestClasses(t *testing.T) {
	own := func(row []model.Port) []model.Port { return row }
	for _, tt := range []struct{ rows, want string }{ // rows divided by |
		{"", "true"},
		{"8080=h1 9000=tcp", "8080=http 9000=tcp true"},
		{"8080=h1|8080=h1", "8080=http true"},
		{"8080=h1|8080=h2", "8080=http true"}, // the codec is no class
		{"80=h1|80=tcp", "80=http(1 as http, 1 as tcp) false"},
		{"80=h1|80=tcp|80=tcp", "80=tcp(1 as http, 2 as tcp) false"},
		{"80=udp|80=tcp", "80=tcp(1 as tcp, 1 as udp) false"},
		{"80=udp|80=h1|80=udp|80=tcp", "80=udp(1 as http, 1 as tcp, 2 as udp) false"},
		{"80=h1|81=tcp", "80=http 81=tcp false"},
		{"53=tcp+udp|53=tcp", "53=tcp+udp false"},
		{"53=tcp+udp|53=udp|53=udp", "53=udp(1 as tcp, 2 as udp) false"},
	} {
		t.Run(tt.rows, func(t *testing.T) {
			var rows [][]model.Port
			for row := range strings.SplitSeq(tt.rows, "|") {
				if ports := readPorts(t, row); ports != nil {
					rows = append(rows, ports)
				}
			}
			r := testseed.Rand(t)
			for range 10 {
				r.Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
				got, uniform := Classes(rows, own)
				var s []string
				for _, p := range got {
					w := fmt.Sprintf("%d=%s", p.Number, p.Class)
					if p.AlsoUDP {
						w += "+udp"
					}
					if p.Disagree != "" {
						w += "(" + p.Disagree + ")"
					}
					s = append(s, w)
				}
				if got := strings.Join(append(s, fmt.Sprint(uniform)), " "); got != tt.want {
					t.Fatalf("got  %s\nwant %s", got, tt.want)
				}
			}
		})
	}
}

// readPorts reads what the tests of Parse print.
func readPorts(t *testing.T, row string) (out []model.Port) {
	t.Helper()
	for _, w := range strings.Fields(row) {
		p := model.Port{}
		num, class, _ := strings.Cut(w, "=")
		class, p.AlsoUDP = strings.CutSuffix(class, "+udp")
		if _, err := fmt.Sscan(num, &p.Number); err != nil {
			t.Fatal(err)
		}
		p.Class, p.App = suffixClass(class)
		out = append(out, p)
	}
	if !slices.IsSortedFunc(out, func(a, b model.Port) int { return int(a.Number) - int(b.Number) }) {
		t.Fatalf("%q is not ascending", row)
	}
	return out
}
