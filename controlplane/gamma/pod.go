package gamma

import (
	"time"

	corev1 "k8s.io/api/core/v1"

	"aether/dataplane/model"
)

// Termination is how a pod leaves (contract 13.3): the longest sleep before a container of
// it is told to end (how long a command runs cannot be told, and counts as none), and the
// time from its deletion to its being killed, which is what the deletion says, or the pod.
// Neither is less than none or more than an hour.
func Termination(p *corev1.Pod) (preStop, grace time.Duration) {
	for i := range p.Spec.Containers {
		if l := p.Spec.Containers[i].Lifecycle; l != nil && l.PreStop != nil && l.PreStop.Sleep != nil {
			preStop = max(preStop, seconds(l.PreStop.Sleep.Seconds))
		}
	}
	s := int64(corev1.DefaultTerminationGracePeriodSeconds)
	if p.Spec.TerminationGracePeriodSeconds != nil {
		s = *p.Spec.TerminationGracePeriodSeconds
	}
	if p.DeletionGracePeriodSeconds != nil {
		s = *p.DeletionGracePeriodSeconds
	}
	return preStop, seconds(s)
}

// maxTermination is the longest that a pod's end is taken to last.
const maxTermination = time.Hour

func seconds(s int64) time.Duration {
	return time.Duration(min(max(s, 0), int64(maxTermination/time.Second))) * time.Second
}

// Volumes are those of a pod; nil where its document names none: one that somebody wrote says
// nothing of them then, as it says nothing of containers (decision 035).
func Volumes(p *corev1.Pod) []model.Volume {
	if p.Spec.Volumes == nil {
		return nil
	}
	out := make([]model.Volume, 0, len(p.Spec.Volumes))
	for i := range p.Spec.Volumes {
		v := model.Volume{Name: p.Spec.Volumes[i].Name}
		if csi := p.Spec.Volumes[i].CSI; csi != nil {
			v.Driver = csi.Driver
		}
		out = append(out, v)
	}
	return out
}
