package file

import (
	"context"
	"slices"

	"aether/dataplane/model"
)

// Views is a directory that was read once, as each node has it.
type Views struct {
	mesh     *model.Mesh // without what is a node's own
	configs  meshConfigs
	problems []problem
	unread   []model.Problem // why there is nothing; nil: it could be read
	nodes    map[string]*nodeFacts
	pods     []item // those whose traffic some node may carry
}

// LoadViews reads dir once, for whoever asks about several nodes. Options.Node is not
// looked at.
func LoadViews(dir string, o Options) *Views {
	l := newLoader(dir, o)
	_, err := l.read(context.Background(), nil)
	v := l.views()
	if err != nil {
		v.unread = []model.Problem{dirProblem(dir, err)}
	}
	return v
}

// local are the pods whose traffic m's node carries, in the order of m.Workloads.
func (v *Views) local(m *model.Mesh) []Pod {
	own := make(map[string]*Pod, len(m.Workloads))
	for _, it := range v.pods {
		if p := it.pod; p.own != nil && (p.part == partWorkload || m.Node != "" && p.node == m.Node) && own[p.own.Container] == nil {
			own[p.own.Container] = p.own // of two that claim one container the first has it
		}
	}
	var out []Pod
	for _, w := range m.Workloads {
		if p := own[w.ContainerID]; p != nil {
			out = append(out, *p)
		}
	}
	return out
}

// Mesh gives what Load gives for a node; "" is one that no pod is on. All but Workloads is
// shared with the meshes of other nodes and may not be changed.
func (v *Views) Mesh(node string) (*model.Mesh, []model.Problem) {
	m := *v.mesh
	m.Node = node
	if n := v.nodes[node]; n != nil && node != "" {
		m.Region, m.Zone = n.region, n.zone
	}
	b := builder{mesh: &m, problems: slices.Clone(v.problems), taken: map[string]item{}}
	for _, it := range v.pods {
		if p := it.pod; p.part == partWorkload || node != "" && p.node == node {
			b.workload(it)
		}
	}
	sortWorkloads(m.Workloads)
	if v.unread != nil {
		return &m, slices.Clone(v.unread)
	}
	return &m, finish(b.problems)
}
